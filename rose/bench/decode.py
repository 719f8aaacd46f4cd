"""`rose bench decode`: time to the first token and for each further one, with 1, 8 and 64 prompts at a time.

Greedy, end tokens ignored, 128 new tokens a prompt of 128 or 2048 random ids that no cache has seen. Before a way is
timed its tokens are held against transformers. With `--profile` a step's kernels are told too, of the engine in this
process and after all it is timed for: a profiler that was there once may go on costing the launches of its process.
Knows the order of things; ways, rows and kernels are other files' business.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product

import numpy as np
import torch

from rose.bench.carriers import Ids
from rose.bench.decode_profile import profile_steps
from rose.bench.decode_reference import DecodeReference
from rose.bench.decode_ways import DecodeWay, EngineWay, HttpWay, LinkWay, Stream
from rose.bench.failures import failed as told_failed
from rose.bench.failures import over_models
from rose.bench.floors import decode_floor_ms
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.meter import RUNS
from rose.bench.processes import served
from rose.bench.records import Percentiles, Row, percentiles, write_rows
from rose.bench.stages import stage
from rose.bench.targets import Target, add_common_arguments, targets
from rose.config import EngineConfig, ModelFolder, read_model_folder
from rose.convert.load import load_generative
from rose.engine.generation.build import build_generation_engine
from rose.errors import InvalidInput, RoseError, StartupError

WAYS = ("engine", "link", "http")
PROMPTS, BATCHES, NEW_TOKENS = (128, 2048), (1, 8, 64), 128
LEAST_AGREEMENT = 0.99
# Lengths of the prompts checked, and tokens of each; fewer clear places than a quarter of them check nothing.
_CHECKED, _CHECKED_TOKENS = (40, 7, 129, 64), 32
_FIRST_ID, _SEED = 5, 7
GRAPH_BYTES = 4 << 30


class DecodeDisagreementError(RoseError):
    """Tokens that are not the reference's: nothing was timed."""


@dataclass(slots=True)
class Timed:
    """What the streams of one load come to, in seconds.

    Attributes:
        requests: from sending to the last token. first: from sending to the first one.
        per_token: of each request, (last token - first) / (n - 1).
        gaps: between two tokens of one request, all of them.
        steps: as per_token, of the tokens that came after every prompt of the round had its first one.
        whole: of all rounds.
        replayed: of the engine's batches, those replayed from a graph. busy: share of `whole` that batches took the
            device; None where the engine does not say.
    """

    requests: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    whole: float = 0.0
    replayed: float = 0.0
    busy: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, LLM_SHAPES)
    parser.add_argument("--via", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--prompt", nargs="+", type=int, default=list(PROMPTS), help="tokens of each prompt")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="prompts at a time")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=12, help="most rounds of a load")
    parser.add_argument("--seconds", type=float, default=8.0, help="no round begins after so long")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument(
        "--profile", action="store_true", help="also time of every kernel of a step, in process, beside --out"
    )
    parser.add_argument("--no-check", action="store_true", help="another server whose weights are not the folder's")


def main(arguments: argparse.Namespace, command: str) -> int:
    """Run every load asked for; returns the exit status: 1 if one failed.

    Raises:
        DecodeDisagreementError: tokens are not the reference's, where there is one model; of several the others run.
        InvalidInput: another server's kernels are wanted.
    """
    if arguments.profile and arguments.url:
        raise InvalidInput("--profile is of the engine in this process; --url measures another server")
    models = arguments.model or ["qwen3-0.6b"]
    found = targets(arguments, command, models, LLM_SHAPES)
    return int(over_models(found, lambda one: _run_model(one, arguments), alone=len(models) == 1) > 0)


def _run_model(target: Target, arguments: argparse.Namespace) -> int:
    """How many loads failed."""
    read = read_model_folder(target.folder, task="generate")
    prompts = list(arguments.prompt) if arguments.url else fitting(target.name, read.max_tokens, arguments)
    # Random weights in 8 bits draw other tokens than in 16: they are timed, not compared.
    compared = not arguments.no_check and arguments.dtype == "auto"
    with stage("reference", arguments.verbose):
        reference = DecodeReference(read, target.device) if compared else None
    failed = 0
    for way, backend in _ways(target, read, prompts, arguments):
        with stage(f"check via {way.via}", arguments.verbose):
            agreement = None if reference is None or way.via == "http" else check(way, reference, read)
        # An engine that --via does not name is there for its kernels alone.
        timed = way.via in arguments.via or bool(arguments.url)
        for prompt, batch in product(prompts, arguments.batch) if timed else ():
            try:
                row = run(way, target, read, prompt, batch, agreement, backend, arguments)
            except Exception as error:  # noqa: BLE001  one load that cannot be served must not cost the others
                failed += 1
                told_failed(f"{target.name} {batch} x {prompt} via {way.via}", error)
                continue
            if arguments.out is not None:
                write_rows(arguments.out, [row])
        if arguments.profile and isinstance(way, EngineWay):
            for prompt, batch in product(prompts, arguments.batch):
                failed += not _profiled(way, target, read, prompt, batch, backend, arguments)
    return failed


def _profiled(
    way: EngineWay,
    target: Target,
    read: ModelFolder,
    prompt: int,
    batch: int,
    backend: str,
    arguments: argparse.Namespace,
) -> bool:
    """Whether a step's kernels could be told; it must not cost the other ways' loads."""
    rounds = [make_prompts(read, prompt, batch, seed=_SEED - number) for number in (1, 2, 3)]
    try:
        with stage(f"profile of {batch} x {prompt}", arguments.verbose):
            profile_steps(way, target, rounds, backend, arguments.out)
    except Exception as error:  # noqa: BLE001
        told_failed(f"{target.name} {batch} x {prompt}, profile", error, "kernels")
        return False
    return True


def fitting(name: str, max_tokens: int, arguments: argparse.Namespace) -> list[int]:
    """The prompts' lengths that leave a model room for the new tokens; a line tells of the others.

    Raises:
        StartupError: there is none.
    """
    room = max_tokens - arguments.new_tokens
    fit = [tokens for tokens in arguments.prompt if tokens <= room]
    longer = ", ".join(str(tokens) for tokens in arguments.prompt if tokens > room)
    told = f"prompts of {longer} tokens and {arguments.new_tokens} new ones are over the {max_tokens} that {name} takes"
    if not fit:
        raise StartupError(f"{told}: there is nothing to time")
    if longer:
        print(f"{told}: left out", flush=True)
    return fit


def check(way: DecodeWay, reference: DecodeReference, read: ModelFolder) -> float:
    """Share of the tokens that are the reference's best where it leads clearly; prompts alone and together.

    Raises:
        DecodeDisagreementError: it is under LEAST_AGREEMENT, or hardly any place is clear.
    """
    prompts = [ids for n in _CHECKED for ids in make_prompts(read, n, 1, seed=_SEED + n)]
    new = _CHECKED_TOKENS
    rounds = [[way.generate([ids], new)[0] for ids in prompts], way.generate(prompts, new)]
    found = reference.agreement(prompts * 2, [stream.ids for streams in rounds for stream in streams])
    told = f"{found.clear:.4f} of {found.places} clear places agree with transformers in fp32, {found.all:.4f} of all"
    if found.clear < LEAST_AGREEMENT or found.places < len(_CHECKED) * new // 2:
        raise DecodeDisagreementError(f"decode via {way.via}: {told}")
    print(f"decode via {way.via}: {told}; bf16 moves a logit by {reference.noise:.3f} of their spread", flush=True)
    return round(found.clear, 4)


def run(
    way: DecodeWay,
    target: Target,
    read: ModelFolder,
    prompt: int,
    batch: int,
    agreement: float | None,
    backend: str,
    arguments: argparse.Namespace,
) -> Row:
    """The row of one load, printed."""
    new = arguments.new_tokens
    found = measure(way, read, prompt, batch, new, rounds=arguments.rounds, seconds_at_most=arguments.seconds)
    step_ms = round(float(np.median(found.steps)) * 1e3, 4) if found.steps else None
    share = None
    if step_ms and target.made is not None and target.device.type == "cuda":
        share = round(decode_floor_ms(target.made.config, batch, prompt + new // 2) / step_ms, 4)
    first, per_token = percentiles(found.first), percentiles(found.per_token)
    count = len(found.requests)
    row = Row(
        **asdict(target.facts),
        load="decode",
        tokens=prompt,
        batch=batch,
        in_flight=batch,
        via=way.via,
        backend=backend,
        graph_hit_share=found.replayed,
        **asdict(percentiles(found.requests)),
        per_s=round(count / found.whole, 2),
        n=count,
        tokens_per_s=round(count * new / found.whole, 1),
        floor_share=share,
        busy_share=found.busy,
        new_tokens=new,
        ttft_ms=first.p50_ms,
        ttft_p99_ms=first.p99_ms,
        tpot_ms=per_token.p50_ms,
        tpot_p99_ms=per_token.p99_ms,
        gap_p99_ms=percentiles(found.gaps).p99_ms,
        step_ms=step_ms,
        agreement=agreement,
    )
    _print(row, first, per_token)
    return row


def measure(
    way: DecodeWay, read: ModelFolder, prompt: int, batch: int, new: int, *, rounds: int, seconds_at_most: float
) -> Timed:
    """Rounds of `batch` prompts sent at once, each round when the one before has ended; two more before, untimed:
    the first time a batch's shape comes it runs plain, the second time it is captured."""
    for number in (1, 2):
        way.generate(make_prompts(read, prompt, batch, seed=_SEED - number), new)
    timed = Timed()
    before = way.counters()
    gc.collect()
    gc.disable()  # the client's collector is not what is measured
    try:
        for number in range(rounds):
            prompts = make_prompts(read, prompt, batch, seed=_SEED + 1000 * number)
            begin = time.perf_counter()
            streams = way.generate(prompts, new)
            timed.whole += time.perf_counter() - begin
            _take(streams, timed)
            if timed.whole > seconds_at_most:
                break
    finally:
        gc.enable()
    after = way.counters()
    if after:  # none of another server's
        done = {name: after[name] - before[name] for name in (*RUNS, "device_us")}
        runs = sum(done[name] for name in RUNS)
        timed.replayed = round(done["graph_hits"] / runs, 4) if runs else 0.0
        timed.busy = round(done["device_us"] * 1e-6 / timed.whole, 4)
    return timed


def _take(streams: Sequence[Stream], timed: Timed) -> None:
    all_began = max(stream.times[0] for stream in streams)
    for stream in streams:
        times = stream.times
        timed.requests.append(times[-1] - stream.start)
        timed.first.append(times[0] - stream.start)
        timed.per_token.append((times[-1] - times[0]) / max(1, len(times) - 1))
        timed.gaps.extend(b - a for a, b in pairwise(times))
        late = [at for at in times if at >= all_began]
        if len(late) > 1:
            timed.steps.append((late[-1] - late[0]) / (len(late) - 1))


def make_prompts(read: ModelFolder, tokens: int, count: int, *, seed: int) -> list[Ids]:
    """Random ids; two of them share no beginning, so no cache of prompts helps."""
    limit = read.architecture.vocab_size if read.generation is None else read.generation.vocab_limit
    generator = np.random.default_rng([seed, tokens, count])
    return list(generator.integers(_FIRST_ID, limit, size=(count, tokens), dtype=np.int32))


def _ways(
    target: Target, read: ModelFolder, prompts: Sequence[int], arguments: argparse.Namespace
) -> Iterator[tuple[DecodeWay, str]]:
    """Each way in turn, ready, with its attention backend; closed when the next one is asked for."""
    if arguments.url:
        with closing(HttpWay(arguments.url, target.name)) as rival:
            yield rival, "unknown"
        return
    # Prompts begin one after another: of a profile the first must have room to go on until the last has begun.
    new = max(arguments.new_tokens, NEW_TOKENS) if arguments.profile else arguments.new_tokens
    timed, checked = max(prompts) + new, max(_CHECKED) + _CHECKED_TOKENS
    longest = min(read.max_tokens, max(timed, checked))
    if "engine" in arguments.via or arguments.profile:
        on_cpu = target.device.type == "cpu"
        with stage("model in this process", arguments.verbose):
            model = load_generative(read, target.device, target.dtype)
        config = EngineConfig(max_tokens=longest, graph_bytes=0 if on_cpu else GRAPH_BYTES)
        told = read.generation
        engine = build_generation_engine(
            model,
            config,
            target.device,
            target.dtype,
            backend=arguments.backend,
            end_ids=() if told is None else told.end_ids,
            vocab_limit=None if told is None else told.vocab_limit,
        )
        with closing(EngineWay(engine)) as way:
            yield way, ", ".join(engine.backend_names)
        del model, engine, way
        gc.collect()
        if not on_cpu:
            torch.cuda.empty_cache()
    others = [via for via in arguments.via if via != "engine"]
    if not others:
        return
    options = ["--backend", arguments.backend, "--task", "generate", "--max-tokens", str(longest)]
    if not arguments.warm_up:
        options.append("--no-warm-up")
    started = served(target.folder, target.name, options, verbose=arguments.verbose)
    with started as where, closing(LinkWay(where.link)) as link:
        if "link" in others:
            yield link, link.backend
        if "http" in others:
            with closing(HttpWay(where.http, target.name, link)) as http:
                yield http, link.backend


def _print(row: Row, first: Percentiles, per_token: Percentiles) -> None:
    share = "" if row.floor_share is None else f"  floor {row.floor_share:4.0%}"
    print(
        f"{row.model:12} {row.in_flight:3} x {row.tokens:<5} + {row.new_tokens:<4} {row.via:6} "
        f"first p50 {first.p50_ms:9.3f} p99 {first.p99_ms:9.3f} ms  "
        f"token p50 {per_token.p50_ms:8.3f} p99 {per_token.p99_ms:8.3f} ms  step {row.step_ms or 0:8.3f} ms  "
        f"{row.tokens_per_s:9.1f} tok/s{share}",
        flush=True,
    )
