"""The self-check: every backend that can be loaded against the float64 reference; ragged ones plainly and through a
graph, paged ones (see check_paged.py) plainly.

Packages of this field have shipped kernels that were wrong on one architecture, head dim or length only, so a backend
that was not checked on this machine is not to be trusted. Knows backends by their surface; knows no models.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from rose.attention_backends.auto import spec_for
from rose.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    backend_names,
    can_capture,
    paged_backend_names,
    try_backend,
)
from rose.attention_backends.check_paged import NotFinite, check_paged, described
from rose.attention_backends.reference import (
    TOLERANCE,
    even_split,
    greedy_split,
    poisoned_qkv,
    reference_attention,
    row_error,
)
from rose.batch import AttentionPlan, Batch

# Around the sizes where a kernel changes its mind: one row, one warp tile, one block, more than one.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 512, 4096)
# Far from any key or value, and zero times it is zero.
FINITE_POISON = 1000.0
# FlashInfer's words for kernels that did not come compiled where FLASHINFER_DISABLE_JIT lets it compile none: nothing
# was found out about them.
_NOT_COMPILED = ("JIT compilation is disabled", "not included in the default JIT cache")
_FULL_HEAD_DIMS = (64, 128, 256)
_FULL_GROUPS = (1, 2, 4, 8)


class StaticAttention:
    """One graph key's attention in static buffers: run plainly, captured, replayed for other splits.

    Args:
        q, k, v: [T, heads, head_dim], read at every run.
        calls: times the attention is run in a row, as the layers of a model would; each takes the result before it as
            its queries.
        stream: where it all runs, or None for one of its own. Graphs reuse each other's memory on one stream only.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        qkv: tuple[Tensor, Tensor, Tensor],
        sequences: int,
        max_length: int,
        key: Hashable,
        calls: int = 1,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._backend = backend
        self.qkv = qkv
        self._calls = calls
        self._device = qkv[0].device
        # Stays None on the CPU, where nothing is captured.
        self.stream = stream
        if stream is None and self._device.type == "cuda":
            self.stream = torch.cuda.Stream(self._device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int32, device=self._device)
        self._ids = torch.zeros(qkv[0].shape[0], dtype=torch.int32, device=self._device)
        self._max_length = max_length
        self._key = key

    def plain(self, lengths: Sequence[int], slot: int = 0) -> Tensor:
        """Plan and run without a graph: [T, heads, head_dim], a copy."""
        with self._on_stream():
            return self._run(self.batch(lengths), slot).clone()

    def capture(self, lengths: Sequence[int], slot: int = 0, pool: Any | None = None) -> None:
        """Run once plainly, then capture, into the memory pool of other graphs if one is given."""
        self.plain(lengths, slot)
        assert self.stream is not None
        with self._on_stream():
            plan = self._backend.plan(self.batch(lengths), slot)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=self.stream):
            self._out = self.run_layers(plan)

    def replay(self, lengths: Sequence[int], slot: int = 0) -> Tensor:
        """Plan and replay: [T, heads, head_dim], a copy."""
        assert self.graph is not None
        with self._on_stream():
            self._backend.plan(self.batch(lengths), slot)
            self.graph.replay()
            return self._out.clone()

    def captures(self, lengths: Sequence[int]) -> bool:
        """Whether there is a graph to be had of this backend on this device."""
        if self.stream is None:
            return False
        with self._on_stream():
            return can_capture(self._backend.plan(self.batch(lengths)))

    def batch(self, lengths: Sequence[int]) -> Batch:
        """A batch of these lengths in the static buffers."""
        offsets = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
        if self.stream is not None:
            offsets = offsets.pin_memory()  # else the copy would wait for the device, and nothing would overlap
        self._cu_seqlens.copy_(offsets, non_blocking=True)
        return Batch(self._ids, self._ids, self._cu_seqlens, tuple(lengths), self._max_length, key=self._key)

    def _run(self, batch: Batch, slot: int) -> Tensor:
        return self.run_layers(self._backend.plan(batch, slot))

    def run_layers(self, plan: AttentionPlan) -> Tensor:
        """All calls of a plan, on the current stream."""
        q, k, v = self.qkv
        for layer in range(self._calls):
            q = plan.run(q, k, v, layer)
        return q

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Everything on one stream, as a capture wants it, in order with the caller's."""
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)


def check_backends(spec: AttentionSpec, full: bool = False) -> dict[str, str | None]:
    """Check every backend of the spec's layout that can serve `spec` on its device.

    Args:
        full: besides `spec` itself, head dims 64, 128, 256, groups of 1, 2, 4, 8 query heads; of ragged ones also
            causal and not, and a sequence of 4096 tokens. Minutes, where kernels must be compiled first.

    Returns:
        By name, None if it agrees with the reference, else why it is not to be used (missing, unsupported or wrong).
    """
    names = paged_backend_names() if spec.layout == "paged" else backend_names()
    return {name: check_backend(name, spec, full) for name in names}


def check_backend(name: str, spec: AttentionSpec, full: bool = False) -> str | None:
    """As `check_backends`, for one."""
    for variant in _variants(spec) if full else (spec,):
        narrowed = spec_for(name, variant)
        found = try_backend(name, narrowed)
        if isinstance(found, str):
            if variant == spec:
                return found
            continue  # the full grid reaches beyond some backends; only `spec` itself decides
        try:
            reason = _check_paged(name, found, narrowed) if spec.layout == "paged" else _check(found, narrowed, full)
        except Exception as error:  # noqa: BLE001  third-party compilers raise kinds of their own
            if any(words in str(error) for words in _NOT_COMPILED):
                return f"has no kernels for {described(variant)}: JIT compilation is disabled"
            return f"failed on {described(variant)}: {type(error).__name__}: {error}"
        if reason is not None:
            return reason
    return None


def _variants(spec: AttentionSpec) -> Iterator[AttentionSpec]:
    yield spec
    maskings = (True,) if spec.layout == "paged" else (False, True)
    for head_dim, group, causal in product(_FULL_HEAD_DIMS, _FULL_GROUPS, maskings):
        yield replace(
            spec, head_dim=head_dim, num_heads=8, num_kv_heads=8 // group, causal=causal, scale=head_dim**-0.5
        )


def _check_paged(name: str, backend: AttentionBackend, spec: AttentionSpec) -> str | None:
    reason = check_paged(backend, spec)
    if not isinstance(reason, NotFinite):
        return reason
    # A cache is bound once, so another one: is it the NaN that lay there, or its own?
    other = try_backend(name, spec)
    if isinstance(other, str) or check_paged(other, spec, FINITE_POISON) is not None:
        return reason
    return f"reads beyond a sequence's end: NaN that another one left in a page comes out ({reason})"


def _check(backend: AttentionBackend, spec: AttentionSpec, full: bool) -> str | None:
    longest = min(spec.max_length or LENGTHS[-1], LENGTHS[-1] if full else 512)
    lengths = tuple(n for n in LENGTHS if n <= longest)
    tokens, sequences = sum(lengths), len(lengths)
    short = min(127, longest)
    few = min(130, short + 3, 3 * short)
    small = (even_split(few, 3), greedy_split(few, 3, short))
    large = (lengths, even_split(tokens, sequences), greedy_split(tokens, sequences, longest), lengths[::-1])
    for splits, bound in ((small, short), (large, longest)):
        plain = StaticAttention(backend, _inputs(sum(splits[0]), spec), len(splits[0]), bound, key=None)
        for split in splits:
            if (reason := _compare(plain.plain(split), plain, split, spec, "run plainly")) is not None:
                return reason
    return _check_graphs(backend, spec, (small, short), (large, longest))


def _check_graphs(
    backend: AttentionBackend, spec: AttentionSpec, *keys: tuple[tuple[tuple[int, ...], ...], int]
) -> str | None:
    """Keys: the splits of each, and its bound of length."""
    (small, _), (large, _) = keys
    pair = [
        StaticAttention(backend, _inputs(sum(splits[0]), spec), len(splits[0]), bound, key=("check", number))
        for number, (splits, bound) in enumerate(keys)
    ]
    if not pair[0].captures(small[0]):
        return None
    # The larger first, as an engine does; then small, large, small, each for another split than it was captured for.
    pair[1].capture(large[0])
    pair[0].capture(small[0])
    order = [(0, small[1]), (1, large[2]), (0, small[0]), (1, large[3]), (1, large[1]), (0, small[1])]
    for turn, (which, split) in enumerate(order):
        out = pair[which].replay(split, slot=turn % 2)
        if (reason := _compare(out, pair[which], split, spec, "replayed from a graph")) is not None:
            return reason
    return None


def _inputs(tokens: int, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    return poisoned_qkv(
        tokens, spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=spec.device, seed=tokens
    )


def _compare(
    out: Tensor, attention: StaticAttention, lengths: Sequence[int], spec: AttentionSpec, how: str
) -> str | None:
    expected = reference_attention(*attention.qkv, lengths, causal=spec.causal, scale=spec.scale, window=spec.window)
    error = row_error(out, expected)
    if error <= TOLERANCE[spec.dtype]:
        return None
    return (
        f"wrong when {how} on {described(spec)} with lengths {', '.join(map(str, lengths))}: a row is off by "
        f"{error:.3g} of its length, at most {TOLERANCE[spec.dtype]:.3g} is rounding"
    )
