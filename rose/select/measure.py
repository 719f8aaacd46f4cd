"""A whole run: products, then the grid of attention, then the numbers of the model; what comes of it is a profile.

Knows the order and the shares of time; knows no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch

from rose.attention_backends.base import AttentionSpec
from rose.attention_backends.choose import Load, choose
from rose.config import ArchitectureConfig, EngineConfig, ModelFolder
from rose.config.profile import ModelNumbers, Products, Profile
from rose.config.profile_files import Found
from rose.convert import load_model
from rose.engine import build_engine
from rose.engine.profiles import attention_shape, model_shape, preferred, this_machine
from rose.errors import RoseError, Unsupported
from rose.kernels import tiles
from rose.models.base import attention_spec
from rose.select import curves, grid
from rose.select.comparing import Sample
from rose.select.cpu import measure_cpu
from rose.select.layer_ways import LayerWays
from rose.select.model_ways import Bench, ModelWays
from rose.select.numbers import Numbers, measure_numbers
from rose.select.paged_ways import PagedWays
from rose.select.products import measure_products, products_of
from rose.select.session import Budget, GridRun, Progress, measure_grid

# Largest batch measured, and tokens of the caches of a step of generating.
BATCH_TOKENS = 32768
CACHE_TOKENS, CPU_CACHE_TOKENS = 65536, 8192
# Of the seconds of a run; what a stage leaves goes to those after it.
PRODUCTS_SHARE, NUMBERS_SHARE = 0.15, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run.

    Attributes:
        batch_tokens: largest batch.
        commit: of what is measured, for the file.
        say: told of what is left out, a line each.
        grids_only: attention alone, to be compared with a profile; products stay as they are.
    """

    seconds: float = 170.0
    seed: int = 1
    batch_tokens: int = BATCH_TOKENS
    commit: str = ""
    progress: Progress | None = None
    say: Callable[[str], None] = lambda line: None
    max_rounds: int = 40
    grids_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`profile`, and the grids it came from with what was skipped, missing and excluded."""

    profile: Profile
    runs: tuple[GridRun, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def measure_model(folder: ModelFolder, device: torch.device, dtype: torch.dtype, name: str, options: Options) -> Result:
    """Everything there is to measure of one model on this device.

    Raises:
        Unsupported: a model that generates, on a CPU.
    """
    if device.type == "cpu":
        return _on_cpu(folder, dtype, name, options)
    budget = Budget(options.seconds)
    spec = attention_spec(folder, device, dtype)
    if folder.generation is not None:
        return measure_generating(folder.architecture, spec, name, options)
    products = _products(folder.architecture, spec, options, budget)
    model = load_model(folder, device, dtype)
    longest = min(folder.max_tokens, options.batch_tokens)
    ways = ModelWays(model, device, dtype, max_tokens=longest, batch_tokens=options.batch_tokens)
    _tell(ways.missing, ways.excluded, options)
    try:
        kept = Budget(budget.left * (1 - NUMBERS_SHARE))
        loads = grid.batches(longest, options.batch_tokens)
        run = measure_grid(
            ways, loads, kept, seed=options.seed, progress=options.progress, max_rounds=options.max_rounds
        )
        numbers = Numbers((), (), ()) if options.grids_only else _numbers(ways, run, longest, options, budget)
    finally:
        ways.close()
    found = curves.budgets(numbers.saturation)
    model_numbers = ModelNumbers(
        shape=model_shape(folder.architecture, ways.shape),
        name=name,
        online_tokens=found and found.online_tokens,
        bulk_tokens=found and found.bulk_tokens,
        inflection_tokens=curves.inflection(numbers.launch),
        fine_tokens=curves.fine_padding(numbers.padding),
        saturation=numbers.saturation,
        launch=numbers.launch,
        padding=numbers.padding,
    )
    return _result((run,), device, name, options, products, (model_numbers,))


def measure_generating(architecture: ArchitectureConfig, spec: AttentionSpec, name: str, options: Options) -> Result:
    """Attention and products of a model that generates; its weights are not needed."""
    budget = Budget(options.seconds)
    products = _products(architecture, spec, options, budget)
    runs = measure_heads(spec, options, budget, paged=True)
    return _result(runs, spec.device, name, options, products)


def measure_heads(
    spec: AttentionSpec, options: Options, budget: Budget | None = None, *, paged: bool = False
) -> tuple[GridRun, ...]:
    """Attention alone, of whole sequences and, if causal and asked for, of steps of generating."""
    budget = budget or Budget(options.seconds)
    longest = min(spec.max_length or options.batch_tokens, options.batch_tokens)
    ragged = LayerWays(replace(spec, layout="ragged"))
    _tell(ragged.missing, ragged.excluded, options)
    half = Budget(budget.left / (2 if paged else 1))
    rest = {"seed": options.seed, "max_rounds": options.max_rounds}
    runs = [measure_grid(ragged, grid.batches(longest, options.batch_tokens), half, progress=options.progress, **rest)]
    if paged and spec.causal:
        held = CPU_CACHE_TOKENS if spec.device.type == "cpu" else CACHE_TOKENS
        ways = PagedWays(replace(spec, layout="paged"), cache_tokens=held)
        _tell(ways.missing, ways.excluded, options)
        loads = grid.decodes(spec.max_length or held, held)
        runs.append(measure_grid(ways, loads, budget, progress=options.progress, **rest))
    return tuple(runs)


def heads_result(runs: tuple[GridRun, ...], device: torch.device, name: str, options: Options) -> Result:
    return _result(runs, device, name, options)


def _products(architecture: ArchitectureConfig, spec: AttentionSpec, options: Options, budget: Budget) -> Products:
    """Measured, and preferred from here on in this process: the grid is of what will serve."""
    if options.grids_only or spec.device.type == "cpu":
        return {}
    if architecture.gated_delta is not None:
        options.say("products are not measured: its layers are of two kinds")
        return {}
    tiles.prefer({})
    share = Budget(budget.left * PRODUCTS_SHARE)
    products = measure_products(products_of(architecture), spec.device, spec.dtype, share, options.progress)
    tiles.prefer(preferred(products))
    return products


def _numbers(ways: ModelWays, run: GridRun, longest: int, options: Options, budget: Budget) -> Numbers:
    points, left_out = run.grid.points, {**run.missing, **run.excluded}
    length = min(512, longest)

    def backend(tokens: int) -> str:
        load = Load(tokens, max(1, tokens // length), grid.bound_of(length))
        choice = choose(ways.shape.head_dim, load, left_out, points)
        return ways.reference if choice is None else choice.backend

    def graphs(tokens: int) -> Bench:
        return ways.bench(backend(tokens))

    def plain(tokens: int) -> Bench:
        return ways.bench(backend(tokens), graphs=False)

    return measure_numbers(
        graphs,
        plain,
        max_tokens=longest,
        batch_tokens=options.batch_tokens,
        seed=options.seed,
        budget=budget,
        progress=options.progress,
    )


def _on_cpu(folder: ModelFolder, dtype: torch.dtype, name: str, options: Options) -> Result:
    if folder.generation is not None:
        raise Unsupported("on a CPU embedders and rerankers are measured; this model generates")
    device, budget = torch.device("cpu"), Budget(options.seconds)
    served = str(dtype).removeprefix("torch.")
    models, left_out = {}, {}
    for kind in dict.fromkeys((dtype, torch.float32, torch.bfloat16)):
        try:
            models[str(kind).removeprefix("torch.")] = load_model(folder, device, kind)
        except RoseError as error:
            if kind is dtype:
                raise
            left_out[str(kind).removeprefix("torch.")] = error.message
            options.say(f"not measured in {kind}: {error.message}")
    limits = EngineConfig(
        online_tokens=1 << 15, bulk_tokens=1 << 15, max_sequences=512, max_tokens=folder.max_tokens, profile="none"
    )
    engines: dict[tuple[str, int], Bench] = {}

    def prepare(kind: str, threads: int, lengths: tuple[int, ...]) -> Sample:
        if (kind, threads) not in engines:
            engine = build_engine(
                models[kind], limits, device, getattr(torch, kind), num_threads=threads, profile=Found()
            )
            engines[kind, threads] = Bench(engine, models[kind].vocab_size)
        bench = engines[kind, threads]
        sequences = bench.inputs(lengths, options.seed)
        bench.sample(sequences)
        return lambda: bench.sample(sequences)

    try:
        found = measure_cpu(
            prepare, dtypes=list(models), max_tokens=folder.max_tokens, budget=budget, progress=options.progress
        )
    finally:
        for bench in engines.values():
            bench.engine.close()
    attention = attention_shape(models[served].attention_spec(device, dtype))
    numbers = ModelNumbers(
        shape=model_shape(folder.architecture, attention),
        name=name,
        online_tokens=found.online_tokens,
        bulk_tokens=found.bulk_tokens,
        num_threads=found.num_threads,
        fastest_dtype=found.fastest_dtype,
        saturation=found.saturation,
        threads=found.threads,
    )
    return _result((), device, name, options, models=(numbers,), left_out=left_out)


def _tell(missing: Mapping[str, str], excluded: Mapping[str, str], options: Options) -> None:
    for name, reason in missing.items():
        options.say(f"{name} is not measured: {reason}")
    for name, reason in excluded.items():
        options.say(f"{name} is excluded: {reason}")


def _result(
    runs: tuple[GridRun, ...],
    device: torch.device,
    name: str,
    options: Options,
    products: Products | None = None,
    models: Sequence[ModelNumbers] = (),
    left_out: Mapping[str, str] | None = None,
) -> Result:
    profile = Profile(
        machine=this_machine(device),
        source=f"rose select-backend, {name}: medians of runs in rotated order, planning included",
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=options.commit,
        grids=tuple(run.grid for run in runs if run.measured),
        models=tuple(models),
        products=products or {},
    )
    reasons = {name: reason for run in runs for name, reason in {**run.missing, **run.excluded}.items()}
    return Result(profile=profile, runs=runs, left_out={**reasons, **(left_out or {})})
