"""The products of a model, for few and for many tokens: as the table has them, by the rule, by the library.

24 weights in turn in one graph, the sum of pieces included, so that no weight comes from the cache. Knows shapes; knows
neither engines nor attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rose.config import ArchitectureConfig
from rose.config.profile import Products
from rose.kernels import gemm_epilogue, tiles
from rose.kernels.activation import activate, gated_activation_ref
from rose.kernels.add_norm import add_rms_norm
from rose.kernels.gemm_sm90 import runs_sm90
from rose.kernels.linear import linear, linear_gated, linear_partial
from rose.select.comparing import Sample, compare
from rose.select.session import Budget, Progress, Silent

# One in each bucket that single queries and batches fall into, those first that most of them do: where time runs out
# the last ones are left to the table. 8192 is "large", half of a full batch.
TOKENS = (128, 8192, 512, 64, 256, 1024)
WEIGHTS = 24
# Distance of a result from that in fp32, over its length: rounding of bf16 makes some 0.003.
TOLERANCE = 0.02


class Product(NamedTuple):
    """[T, k] x [n, k]; `n`: outputs, of one half where gated. `activation` follows it, where there is one."""

    op: tiles.Op
    n: int
    k: int
    activation: str | None = None

    @property
    def key(self) -> str:
        return tiles.key(self.op, self.n, self.k)


def products_of(architecture: ArchitectureConfig) -> tuple[Product, ...]:
    """Of one layer: q, k, v together, o, and the feed-forward's."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    width = architecture.num_heads * architecture.head_dim
    qkv = width + 2 * architecture.num_kv_heads * architecture.head_dim
    op: tiles.Op = "gated" if architecture.activation == "silu" else "linear"
    found = (
        Product("linear", qkv, hidden),
        Product("partial", hidden, width),
        Product(op, inner, hidden, architecture.activation),
        Product("partial", hidden, inner),
    )
    # Two of one shape are one row of the table: the later one counts, which has the activation.
    return tuple({product.key: product for product in found}.values())


def measure_products(
    products: tuple[Product, ...], device: torch.device, dtype: torch.dtype, budget: Budget, progress: Progress | None
) -> Products:
    """µs of one product by variant; one that fails or is wrong is absent."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    wanted = [(product, tokens) for tokens in TOKENS for product in products]
    with (progress or Silent()).stage("products", len(wanted)) as advance:
        for number, (product, tokens) in enumerate(wanted):
            if budget.left <= 0:
                break
            chains = dict(_chains(product, tokens, device, dtype))
            comparison = compare(chains, max_rounds=16, time_left=budget.share(len(wanted) - number))
            us = {name: round(taken / WEIGHTS, 3) for name, taken in comparison.us.items()}
            if us:
                found.setdefault(product.key, {})[tiles.bucket(tokens)] = us
            advance(f"{product.key} at {tokens}")
    return found


def _chains(product: Product, tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Sample]]:
    generator = torch.Generator(device).manual_seed(product.n + product.k + tokens)
    rows = product.n * (2 if product.op == "gated" else 1)
    x = torch.randn(tokens, product.k, device=device, generator=generator).to(dtype)
    weights = [
        (torch.randn(rows, product.k, device=device, generator=generator) * product.k**-0.5).to(dtype)
        for _ in range(WEIGHTS)
    ]
    residual = torch.zeros(tokens, product.n, device=device, dtype=dtype)
    gain = torch.ones(product.n, device=device, dtype=dtype)
    truth = _reference(product, x, weights[0])
    for name, run in _variants(product, x).items():

        def chain(run: Callable[[Tensor, Tensor], Tensor] = run) -> None:
            for weight in weights:
                out = run(x, weight)
                if product.op == "partial":
                    add_rms_norm(out, residual, gain, 1e-6)

        try:
            first = run(x, weights[0]).float()
            first = first.sum(0) if product.op == "partial" else first
            if not float((first - truth).norm()) <= TOLERANCE * float(truth.norm()):
                continue
            yield name, _graph_sample(chain)
        except Exception:  # noqa: BLE001  a variant that does not compile or run here is no choice
            continue


def _variants(product: Product, x: Tensor) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Each as the layers call it: what goes on after a library's product is part of its time."""
    op, activation, tokens = product.op, product.activation, x.shape[0]
    run: Callable[[Tensor, Tensor], Tensor]
    if op == "gated":
        run = partial(linear_gated, activation=activation or "silu")
    elif op == "partial":
        run = linear_partial
    else:
        run = partial(linear, activation=activation)
    rule = tiles.heuristic(op, product.n, product.k, tokens)
    tile = tiles.choose(op, product.n, product.k, tokens)
    variants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"table": run}
    epilogue = tiles.prefers_epilogue(op, product.n, product.k, tokens)
    if tile is not None or epilogue:
        variants["library"] = _preferring(product.key, tokens, "library", run)
    if not epilogue and op != "gated" and activation is None and gemm_epilogue.serves(x, product.n, None, gated=False):
        variants["epilogue"] = _preferring(product.key, tokens, "epilogue", run)
    if tile != rule and not (rule.kind == "sm90" and not runs_sm90(x.device)):
        variants["heuristic"] = _preferring(product.key, tokens, "heuristic", run)
    return variants


def _preferring(
    key: str, tokens: int, variant: tiles.Variant, run: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    def preferred(x: Tensor, weight: Tensor) -> Tensor:
        with tiles.preferring(key, tiles.bucket(tokens), variant):
            return run(x, weight)

    return preferred


def _reference(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    out = x.float() @ weight.float().t()
    if product.op == "gated":
        return gated_activation_ref(out, product.activation or "silu")
    return activate(out, product.activation)


def _graph_sample(chain: Callable[[], None]) -> Sample:
    """Captured once; a sample is one replay by the device's own clock."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return sample
