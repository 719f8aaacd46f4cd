"""The engine on a CUDA device: graphs equal plain runs, two in flight keep their rows, memory runs out safely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.bench.shapes import build_checkpoint
from rose.config import EngineConfig, read_model_folder
from rose.convert import load_model
from rose.engine.build import build_engine
from rose.engine.engine import Engine
from rose.engine.request import Request
from tests.engine.every_bucket import BUCKETS, ONE_BATCH, lengths_in

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
GRAPHS = 1 << 30


@pytest.fixture(scope="module", params=["tiny-bge-m3", "tiny-pplx-embed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(request.param, tmp_path_factory.mktemp("shapes") / request.param)


def build(folder: Path, **limits: int) -> Engine:
    read = read_model_folder(folder)
    config = EngineConfig(**{"max_tokens": read.max_tokens, "graph_bytes": GRAPHS, **limits})
    return build_engine(load_model(read, DEVICE, DTYPE), config, DEVICE, DTYPE)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    built = build(folder)
    yield built
    built.close()


def sequences(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(5, 900, n, dtype=np.int32) for n in lengths]


_next = iter(range(1, 1 << 60))


def embed(engine: Engine, items: list[np.ndarray]) -> np.ndarray:
    engine.add(Request(next(_next), list(items)))
    out: np.ndarray | None = None
    while engine.queued_requests or engine.in_flight:
        for result in engine.step():
            block = result.outputs["dense"].result()
            if out is None:
                out = np.empty((len(items), block.shape[1]), np.float32)
            out[[item.index for item in result.items]] = block
    assert out is not None
    assert np.isfinite(out).all()
    return out


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("lengths", [[1], [17], [64], [128], [1, 1], [37, 128, 1, 64], [300, 17], [512], [700, 324]])
def test_plain_captured_and_replayed_runs_are_bitwise_equal(engine: Engine, lengths: list[int]) -> None:
    items = sequences(lengths)
    plain, captured, replayed, again = (embed(engine, items) for _ in range(4))
    np.testing.assert_array_equal(plain, captured)
    np.testing.assert_array_equal(plain, replayed)
    np.testing.assert_array_equal(plain, again)


def test_every_bucket_replays_what_it_ran_plain(folder: Path) -> None:
    engine = build(folder, **{**ONE_BATCH, "graph_bytes": 8 << 30})
    try:
        for tokens in BUCKETS:
            items = sequences(lengths_in(tokens), seed=tokens)
            plain, captured, replayed = (embed(engine, items) for _ in range(3))
            np.testing.assert_array_equal(plain, captured, err_msg=str(tokens))
            np.testing.assert_array_equal(plain, replayed, err_msg=str(tokens))
        assert engine.graphs.metrics.hits >= len(BUCKETS)
    finally:
        engine.close()


def test_after_the_last_graph_was_let_go_others_are_captured(folder: Path) -> None:
    engine = build(folder)
    try:
        items = sequences([60, 4])
        first = [embed(engine, items) for _ in range(3)]
        captures = engine.graphs.metrics.captures
        engine.graphs.clear()
        second = [embed(engine, items) for _ in range(3)]
        assert engine.graphs.metrics.captures == captures + 1
        for answer in (*first, *second):
            np.testing.assert_array_equal(answer, first[0])
    finally:
        engine.close()


def test_small_large_small_leaves_nothing_behind(engine: Engine) -> None:
    """Report C17 (vllm#57136): graphs of several sizes share a pool, and replays in any order equal the first run."""
    sizes = [[64], [1000], [30, 34], [2000, 48], [5], [512, 512]]
    first = [embed(engine, sequences(lengths, seed=i)) for i, lengths in enumerate(sizes) for _ in range(1)]
    order = np.random.default_rng(3).integers(0, len(sizes), 60)
    for i in order:
        np.testing.assert_array_equal(embed(engine, sequences(sizes[i], seed=int(i))), first[i])


def test_company_within_a_key_changes_no_bit(engine: Engine) -> None:
    """Report C03 (tei#649): one text, much company, never two clusters of answers."""
    fixed = sequences([50])[0]
    answers = [embed(engine, [fixed, *sequences([70], seed=seed)])[0] for seed in range(100)]
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])


def test_across_keys_answers_agree(engine: Engine) -> None:
    """Report C08 (vllm#15393): 64 mixed texts batched against each alone."""
    items = sequences(np.random.default_rng(5).integers(1, 300, 64).tolist(), seed=9)
    together = embed(engine, items)
    alone = np.concatenate([embed(engine, [item]) for item in items])
    assert cosine(together, alone).min() >= 0.9999


@pytest.mark.parametrize("total", [16383, 16384, 16385])
def test_batches_around_16384_tokens(folder: Path, total: int) -> None:
    """Report C120 (flashinfer#1419): many short sequences at and around 16,384 tokens."""
    engine = build(folder, online_tokens=20000, bulk_tokens=20000)
    try:
        lengths = [128] * 127 + [total - 127 * 128]
        items = sequences(lengths, seed=total)
        together = embed(engine, items)
        alone = np.concatenate([embed(engine, [item]) for item in items[:4] + items[-2:]])
        assert cosine(together[[0, 1, 2, 3, -2, -1]], alone).min() >= 0.9999
    finally:
        engine.close()


def test_one_token_sequences(engine: Engine) -> None:
    items = sequences([1] * 200)
    together = embed(engine, items)
    alone = np.concatenate([embed(engine, [item]) for item in items[:8]])
    assert cosine(together[:8], alone).min() >= 0.9999


def test_two_batches_in_flight_keep_their_rows(engine: Engine) -> None:
    """Report C126 (mstar P#236): staging of the next step must not reach the running one. 10,000 steps."""
    generator = np.random.default_rng(11)
    pool = sequences([1, 5, 17, 30, 33, 47, 61, 64])
    expected = [embed(engine, [item])[0] for item in pool]
    flying: list[tuple[list[int], object]] = []
    launched = 0
    while launched < 10_000:
        picks = generator.integers(0, len(pool), int(generator.integers(1, 5))).tolist()
        engine.add(Request(next(_next), [pool[i] for i in picks]))
        while engine.queued_requests:
            for result in engine.step():
                flying.append(([picks[item.index] for item in result.items], result.outputs["dense"]))
                launched += 1
            while len(flying) > 2 or (flying and flying[0][1].ready()):  # type: ignore[attr-defined]
                rows, lazy = flying.pop(0)
                got = lazy.result()  # type: ignore[attr-defined]
                assert cosine(got, np.stack([expected[i] for i in rows])).min() >= 0.9999
    for rows, lazy in flying:
        assert cosine(lazy.result(), np.stack([expected[i] for i in rows])).min() >= 0.9999  # type: ignore[attr-defined]
    assert engine.graphs.metrics.hits > 5_000


def test_poisoned_memory_reaches_no_answer(folder: Path) -> None:
    """Reports C15 (sglang P#15757), C16 (flash-attention#1228): padding and stale memory hold NaN, answers do not."""
    engine = build(folder)
    try:
        shapes = [[21], [64], [100, 3], [900], [17, 200, 1]]
        first = [embed(engine, sequences(s, seed=i)) for i, s in enumerate(shapes)]
        for _ in range(3):
            nan = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(16)]
            del nan
            torch.cuda.synchronize()
            for i, s in enumerate(shapes):
                np.testing.assert_array_equal(embed(engine, sequences(s, seed=i)), first[i])
    finally:
        engine.close()


def test_a_tiny_budget_evicts_and_keeps_answering(folder: Path) -> None:
    engine = build(folder, graph_bytes=1)
    try:
        for seed in range(4):
            embed(engine, sequences([40, 20], seed=seed))
        assert engine.graphs.metrics.hits == 0
        assert engine.graphs.metrics.plain > 0
    finally:
        engine.close()


def test_out_of_memory_at_capture_falls_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report C132 (vllm#49224): the capture fails, the batch is answered all the same, and it is counted."""
    engine = build(folder)
    try:
        items = sequences([33])
        expected = embed(engine, items)

        def refuse(self: object, key: object, fn: object) -> object:
            raise torch.OutOfMemoryError("out of memory")

        monkeypatch.setattr("rose.engine.cuda.CudaCapturer.capture", refuse)
        for _ in range(3):
            np.testing.assert_array_equal(embed(engine, items), expected)
        assert engine.graphs.metrics.failed == 1
        monkeypatch.undo()
        np.testing.assert_array_equal(embed(engine, items), expected)
    finally:
        engine.close()


def test_memory_is_flat_after_warm_up(engine: Engine) -> None:
    """Report C142 (infinity#517)."""

    def rounds(n: int) -> None:
        for i in range(n):
            embed(engine, sequences([(i * 37) % 500 + 1, 64], seed=i))

    rounds(60)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rounds(60)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_whole_spans_are_whole_vectors_and_empty_ones_are_zero(engine: Engine, folder: Path) -> None:
    if read_model_folder(folder).pooling is None or read_model_folder(folder).pooling.modes != ("mean",):
        pytest.skip("parts are pooled by their mean, and this model pools otherwise")
    items = sequences([40, 7, 129])
    whole = embed(engine, items)
    spans = [np.array([[0, len(ids)], [3, 3], [1, 5]], dtype=np.int32) for ids in items]
    captures = engine.graphs.metrics.captures
    for _ in range(3):
        engine.add(Request(next(_next), items, spans=spans))
        results = [result for _ in range(3) for result in engine.step()]
        rows = np.concatenate([result.outputs["dense"].result() for result in results]).reshape(3, 3, -1)
        assert cosine(rows[:, 0], whole).min() >= 0.9999
        assert not rows[:, 1].any()
        assert np.isfinite(rows).all()
    assert engine.graphs.metrics.captures == captures
