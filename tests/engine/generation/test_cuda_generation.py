"""The generating engine in bf16 on a CUDA device with the backend it would take itself: graphs, company, memory.

Tokens are held against transformers in fp32 place by place: each must be, up to rounding, the likeliest after what came
before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from rose.config import EngineConfig, ModelFolder
from rose.convert import load_generative
from rose.engine.generation.buckets import GREEDY, Draw
from rose.engine.generation.build import build_generation_engine
from rose.engine.generation.engine import GenerationEngine
from tests.engine.generation.driving import Reference, generate, make_folder, prompts, staggered

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# Logits of the tiny models have a spread of some units; rounding to bf16 moves them by hundredths.
SLACK = 0.15


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Shapes the kernels are made for: 64 values a head, 256 a row."""
    shape = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 384}
    return make_folder(tmp_path_factory.mktemp("lm") / "large", num_layers=3, max_positions=4096, **shape)


@pytest.fixture(scope="module")
def truth(large: ModelFolder) -> Reference:
    return Reference(large)


def build(folder: ModelFolder, **limits: int) -> GenerationEngine:
    config = EngineConfig(
        **{"max_tokens": folder.max_tokens, "kv_cache_bytes": 1 << 28, "graph_bytes": 1 << 30, **limits}
    )
    assert folder.generation is not None
    return build_generation_engine(
        load_generative(folder, DEVICE, DTYPE), config, DEVICE, DTYPE, vocab_limit=folder.generation.vocab_limit
    )


@pytest.fixture(scope="module")
def engine(large: ModelFolder) -> Iterator[GenerationEngine]:
    built = build(large)
    yield built
    built.close()


def likely(truth: Reference, ids: np.ndarray, tokens: Sequence[int]) -> None:
    logits = truth.logits([*ids.tolist(), *tokens])[len(ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float((logits.max(-1).values - chosen).max()) <= SLACK


@pytest.mark.parametrize("count", [1, 3, 8, 20, 64])
def test_tokens_are_the_likeliest(engine: GenerationEngine, truth: Reference, count: int) -> None:
    items = prompts(np.random.default_rng(count).integers(1, 300, count).tolist(), count)
    answers = generate(engine, items, max_new_tokens=40)
    for ids, answer in zip(items[:12], answers, strict=False):
        assert len(answer.tokens) == 40
        likely(truth, ids, answer.tokens)
    assert engine.graphs.metrics.failed == 0


def test_long_contexts(engine: GenerationEngine, truth: Reference) -> None:
    """Across the bounds of graphs, with prompts in chunks."""
    items = prompts([1000, 2500, 4000])
    for ids, answer in zip(items, generate(engine, items, max_new_tokens=60), strict=True):
        likely(truth, ids, answer.tokens)


def test_plain_captured_and_replayed_runs_are_bitwise_equal(large: ModelFolder) -> None:
    engine = build(large, prefix_cache=False)
    ids = prompts([50])[0]
    runs = []
    for _ in range(4):
        answer = generate(engine, [ids], max_new_tokens=8, logprobs=4)[0]
        runs.append([(new.token, new.logprob, tuple(new.top)) for new in answer.news])
    assert runs[1:] == runs[:-1]
    assert engine.graphs.metrics.captures == 2  # the prompt's batch and that of one decoding sequence
    engine.close()


def test_arrivals_and_preemption(large: ModelFolder, truth: Reference) -> None:
    page = 2 * 3 * 16 * 2 * 64 * 2
    engine = build(large, kv_cache_bytes=60 * page, prefill_tokens=200, max_running=24)
    items = prompts(np.random.default_rng(5).integers(1, 200, 40).tolist(), 9)
    work = [(ids, {"max_new_tokens": 30}) for ids in items]
    for ids, answer in zip(items, staggered(engine, work, 3), strict=True):
        assert len(answer.tokens) == 30
        likely(truth, ids, answer.tokens)
    assert engine.counters()["preemptions"] > 0
    engine.close()


def test_prompts_of_any_size_in_any_company(large: ModelFolder, truth: Reference) -> None:
    """Small, large and small again, alone and beside decoding sequences, over pages full of NaN: replayed by graphs
    that other lengths were captured with."""
    engine = build(large, prefix_cache=False, prefill_tokens=600, max_running=16)
    generator = np.random.default_rng(3)
    for turn in range(4):
        for layer in range(3):
            for part in engine._side.backend._cache.layer(layer):
                part[1:] = torch.nan
        items = prompts([20, 700, 3, *generator.integers(1, 400, 9).tolist(), 128, 20], turn)
        answers = [generate(engine, [ids], max_new_tokens=4)[0] for ids in items]
        answers += generate(engine, items, max_new_tokens=12)
        work = [(ids, {"max_new_tokens": 12}) for ids in items]
        answers += staggered(engine, work, turn)
        for ids, answer in zip(items * 3, answers, strict=True):
            assert answer.error is None
            likely(truth, ids, answer.tokens)
    held = [key for key in engine.graphs._held if key.sequences > key.decodes]
    assert any(key.decodes for key in held)
    assert any(not key.decodes for key in held)
    assert engine.graphs.metrics.failed == 0
    engine.close()


def test_seeds_repeat_in_one_graph(engine: GenerationEngine) -> None:
    ids = prompts([30])[0]
    alone = [generate(engine, [ids], temperature=0.9, top_p=0.9, seed=5, max_new_tokens=30)[0].tokens for _ in range(4)]
    assert alone[1:] == alone[:-1]
    others = {tuple(generate(engine, [ids], temperature=0.9, seed=s, max_new_tokens=30)[0].tokens) for s in range(6)}
    assert len(others) == 6


def test_warm_up_and_flat_memory(large: ModelFolder) -> None:
    engine = build(large, max_running=16)
    draws = [GREEDY, Draw(sampled=True)]
    keys = engine.decode_keys(large.max_tokens, draws) + engine.prompt_keys(512, 256, draws)
    engine.warmup(keys)
    metrics = engine.graphs.metrics
    assert (metrics.captures, metrics.failed) == (len(keys), 0)

    def rounds(n: int) -> None:
        for i in range(n):
            generate(engine, prompts([5 + i, 60, 9 * i + 1], i), max_new_tokens=20)

    for _ in range(3):  # whatever else comes is captured by the second round
        rounds(20)
    torch.cuda.synchronize()
    before, captures = torch.cuda.memory_allocated(), metrics.captures
    rounds(20)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert (metrics.captures, metrics.failed) == (captures, 0)
    engine.close()


def test_a_poisoned_cache_reaches_no_answer(large: ModelFolder, truth: Reference) -> None:
    """Pages start full of NaN, as pages may be that another sequence left behind."""
    engine = build(large)
    cache = engine._side.backend._cache
    for layer in range(3):
        for part in cache.layer(layer):
            part[1:] = torch.nan
    items = prompts([1, 17, 200, 33])
    for ids, answer in zip(items, generate(engine, items, max_new_tokens=30), strict=True):
        assert answer.error is None
        likely(truth, ids, answer.tokens)
    engine.close()


def test_out_of_memory_at_capture_falls_back(large: ModelFolder, truth: Reference, monkeypatch) -> None:
    engine = build(large)

    def refuse(self: object, key: object, fn: object) -> object:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("rose.engine.cuda.CudaCapturer.capture", refuse)
    ids = prompts([50])[0]
    likely(truth, ids, generate(engine, [ids], max_new_tokens=10)[0].tokens)
    assert engine.graphs.metrics.failed == 1
    assert dataclasses.asdict(engine.graphs.metrics)["captures"] == 0
    engine.close()
