"""Several replicas behind one front: order, balance, failure, refusal, cancellation and deadlines."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from rose.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    NonFinite,
    Overloaded,
    StartupError,
    TokenizerMismatch,
    Unavailable,
)
from rose.gateway.metrics import Metrics
from rose.gateway.replicas import ReplicaPool
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_from_proto
from tests.gateway.conftest import DIMENSION, card_for
from tests.gateway.expected import answer_for, vector_of
from tests.gateway.fake_engine import FakeEngine


def sequences_of(*lengths, seed=0):
    made = np.random.default_rng(seed)
    return [made.integers(0, 400, length).astype(np.int32) for length in lengths]


@asynccontextmanager
async def pool_over(folder, tmp_path, *cards, check=lambda card, address: None, up=True):
    """A pool over fresh fakes, waiting until all of them were accepted."""
    async with AsyncExitStack() as stack:
        paths = [str(tmp_path / f"e{i}") for i in range(len(cards))]
        engines = [
            await stack.enter_async_context(FakeEngine(path, card)) for path, card in zip(paths, cards, strict=True)
        ]
        pool = await stack.enter_async_context(ReplicaPool([f"unix:{path}" for path in paths], check, Metrics()))
        if up:
            await until(lambda: len(pool.ready) == len(cards))
        yield pool, engines


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def soon(seconds=10.0):
    return asyncio.get_running_loop().time() + seconds


def check_rows(result, sequences):
    expected = np.stack([vector_of(ids, DIMENSION) for ids in sequences])
    assert np.array_equal(result.outputs["dense"], expected)


@pytest.fixture
def small(text_folder):
    """A card that makes many parts of little."""
    return card_for(text_folder, max_batch_tokens=200, max_request_items=7)


def test_order_survives_replicas_that_answer_backwards(text_folder, tmp_path, small):
    """Report C12 (ollama#6187): 200 texts of very different lengths, cut over two replicas that answer last-first."""

    async def run():
        async with pool_over(text_folder, tmp_path, small, small) as (pool, engines):
            for engine in engines:
                engine.backwards = 3
                engine.delay_s = 0.001
            lengths = [1 + (7 * i * i) % 120 for i in range(200)]
            sequences = sequences_of(*lengths)

            async def let_go():
                while True:  # the last parts never make three
                    await asyncio.sleep(0.02)
                    for engine in engines:
                        engine.release()

            releaser = asyncio.create_task(let_go())
            result = await pool.embed(sequences, deadline=soon())
            releaser.cancel()
            check_rows(result, sequences)
            assert result.prompt_tokens == sum(lengths)
            parts = [request for engine in engines for request in engine.seen]
            assert result.timing.batches == len(parts) > 20
            for request in parts:
                assert len(request.tokens.lengths) <= 7
                assert sum(request.tokens.lengths) <= 200
            assert all(len(engine.seen) > 5 for engine in engines)

    asyncio.run(run())


def test_no_more_parts_are_sent_than_keep_the_replica_busy(text_folder, tmp_path, small):
    async def run():
        async with pool_over(text_folder, tmp_path, small) as (pool, (engine,)):
            engine.backwards = 1000
            work = asyncio.create_task(pool.embed(sequences_of(*[100] * 40), deadline=soon()))
            await until(lambda: len(engine.seen) == 3)
            await asyncio.sleep(0.02)
            assert len(engine.seen) == 3
            assert pool.replicas[0].outstanding_tokens == 600
            engine.backwards = 1
            engine.release()
            check_rows(await work, sequences_of(*[100] * 40))
            assert pool.replicas[0].outstanding_tokens == 0

    asyncio.run(run())


def test_the_replica_with_fewer_outstanding_tokens_takes_the_next_request(text_folder, tmp_path):
    async def run():
        card = card_for(text_folder)
        async with pool_over(text_folder, tmp_path, card, card) as (pool, engines):
            for engine in engines:
                engine.backwards = 1000
            big = asyncio.create_task(pool.embed(sequences_of(500), deadline=soon()))
            await until(lambda: sum(len(engine.seen) for engine in engines) == 1)
            small = [asyncio.create_task(pool.embed(sequences_of(10, seed=i), deadline=soon())) for i in range(8)]
            await until(lambda: sum(len(engine.seen) for engine in engines) == 9)
            assert sorted(len(engine.seen) for engine in engines) == [1, 8]
            for engine in engines:
                engine.release()
            await asyncio.gather(big, *small)

    asyncio.run(run())


def test_idle_replicas_share_a_large_request(text_folder, tmp_path):
    async def run():
        card = card_for(text_folder, max_batch_tokens=16384)
        async with pool_over(text_folder, tmp_path, card, card) as (pool, engines):
            sequences = sequences_of(*[100] * 120)
            check_rows(await pool.embed(sequences, deadline=soon()), sequences)
            sent = [sum(sum(request.tokens.lengths) for request in engine.seen) for engine in engines]
            assert sorted(sent) == [6000, 6000]
            await pool.embed(sequences[:20], deadline=soon())
            assert sum(len(engine.seen) for engine in engines) == 3  # too small to be worth halving

    asyncio.run(run())


def test_a_part_of_a_lost_replica_is_run_elsewhere(text_folder, tmp_path, small):
    async def run():
        async with pool_over(text_folder, tmp_path, small, small) as (pool, engines):
            engines[0].backwards = 1000
            sequences = sequences_of(*[50] * 40)
            work = asyncio.create_task(pool.embed(sequences, deadline=soon()))
            await until(lambda: len(engines[0].seen) > 0)
            await engines[0].__aexit__()
            check_rows(await work, sequences)
            assert len(pool.ready) == 1
            assert pool._metrics.retries._value.get() >= 1

    asyncio.run(run())


@pytest.mark.parametrize("error", [Unavailable("draining", retry_after_s=3.0), Overloaded("full", retry_after_s=2.0)])
def test_a_replica_that_cannot_take_a_part_is_passed_over(text_folder, tmp_path, error):
    async def run():
        card = card_for(text_folder)
        async with pool_over(text_folder, tmp_path, card, card) as (pool, engines):

            def fault(request):
                raise error

            engines[0].fault = fault
            for seed in range(4):
                sequences = sequences_of(20, seed=seed)
                check_rows(await pool.embed(sequences, deadline=soon()), sequences)
            engines[1].fault = fault
            with pytest.raises(type(error)) as refused:
                await pool.embed(sequences_of(20), deadline=soon())
            assert refused.value.retry_after_s == error.retry_after_s

    asyncio.run(run())


def test_later_parts_wait_for_room_and_the_first_do_not(text_folder, tmp_path, small):
    """A bulk request that was let in is not refused half-way, after much of it was computed."""

    async def run():
        async with pool_over(text_folder, tmp_path, small) as (pool, (engine,)):
            sequences = sequences_of(*[100] * 20)
            full = [False, False, False, False, True, True, False, True]

            def fault(request):
                if full and full.pop(0):
                    raise Overloaded("full", retry_after_s=0.01)

            engine.fault = fault
            check_rows(await pool.embed(sequences, deadline=soon()), sequences)
            assert len(engine.seen) == 10 + 3
            full[:] = [True]
            with pytest.raises(Overloaded):
                await pool.embed(sequences, deadline=soon())
            full[:] = [False] * 3 + [True] * 10_000
            with pytest.raises((Overloaded, DeadlineExceeded)):
                await pool.embed(sequences, deadline=soon(0.3))

    asyncio.run(run())


def test_a_fault_of_one_item_is_named_by_its_place_in_the_request_and_ends_the_others(text_folder, tmp_path, small):
    async def run():
        async with pool_over(text_folder, tmp_path, small) as (pool, (engine,)):
            sequences = sequences_of(*[60] * 30)
            bad = sequences[17].tolist()

            def fault(request):
                for index, ids in enumerate(tokens_from_proto(request.tokens)):
                    if ids.tolist() == bad:
                        raise InvalidInput("this one", param="input", index=index)

            engine.fault = fault
            engine.delay_s = 0.002
            with pytest.raises(InvalidInput, match="this one") as refused:
                await pool.embed(sequences, deadline=soon())
            assert refused.value.index == 17
            seen = len(engine.seen)
            await asyncio.sleep(0.03)
            assert len(engine.seen) == seen < 10
            assert pool.replicas[0].outstanding_tokens == 0

    asyncio.run(run())


def test_nan_from_a_replica_is_an_error_for_its_item(text_folder, tmp_path, small):
    """Report C26 (vllm#19661)."""

    async def run():
        async with pool_over(text_folder, tmp_path, small) as (pool, (engine,)):
            sequences = sequences_of(*[60] * 9)

            def poisoned(card, request):
                answer = answer_for(card, request)
                if tokens_from_proto(request.tokens)[-1].tolist() == sequences[8].tolist():
                    answer.outputs[0].values.data = answer.outputs[0].values.data[:-4] + b"\x00\x00\xc0\x7f"
                return answer

            engine.answer = poisoned
            with pytest.raises(NonFinite) as refused:
                await pool.embed(sequences, deadline=soon())
            assert refused.value.index == 8
            check_rows(await pool.embed(sequences[:8], deadline=soon()), sequences[:8])

    asyncio.run(run())


def test_cancelling_a_request_cancels_every_part_and_sends_no_more(text_folder, tmp_path, small):
    """Report C149 (vllm#10806): nobody waits any more, so nothing more is computed."""

    async def run():
        async with pool_over(text_folder, tmp_path, small) as (pool, (engine,)):
            engine.backwards = 1000
            work = asyncio.create_task(pool.embed(sequences_of(*[100] * 60), deadline=soon()))
            await until(lambda: len(engine.seen) == 3)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            await until(lambda: len(engine.cancelled) == 3)
            await asyncio.sleep(0.02)
            assert len(engine.seen) == 3
            assert pool.replicas[0].outstanding_tokens == 0

    asyncio.run(run())


def test_deadlines_travel_with_every_part_and_hold_here_too(text_folder, tmp_path, small):
    """Report C148 (infinity#546)."""

    async def run():
        async with pool_over(text_folder, tmp_path, small) as (pool, (engine,)):
            await pool.embed(sequences_of(*[100] * 4), deadline=soon(60.0))
            # Rounded up to a whole millisecond, after a sum of floating-point seconds.
            assert all(30_000 < deadline <= 60_001 for deadline in engine.deadlines)
            engine.backwards = 1000
            with pytest.raises(DeadlineExceeded):
                await pool.embed(sequences_of(10), deadline=soon(0.05))
            await until(lambda: len(engine.cancelled) == 1)
            seen = len(engine.seen)
            with pytest.raises(DeadlineExceeded):
                await pool.embed(sequences_of(10), deadline=soon(-1.0))
            assert len(engine.seen) == seen

    asyncio.run(run())


def test_a_lost_replica_comes_back_by_itself(text_folder, tmp_path):
    async def run():
        card = card_for(text_folder)
        async with pool_over(text_folder, tmp_path, card) as (pool, (engine,)):
            await engine.__aexit__()
            await until(lambda: not pool.ready)
            with pytest.raises(Unavailable, match="no replica is ready") as refused:
                await pool.embed(sequences_of(3), deadline=soon())
            assert refused.value.retry_after_s is not None
            async with FakeEngine(engine.path, card):
                await until(lambda: len(pool.ready) == 1)
                check_rows(await pool.embed(sequences_of(3), deadline=soon()), sequences_of(3))

    asyncio.run(run())


def test_a_draining_engine_gets_no_more_parts(text_folder, tmp_path):
    async def run():
        card = card_for(text_folder)
        async with pool_over(text_folder, tmp_path, card, card) as (pool, engines):
            engines[0].stats = pb.ServerStats(draining=True)
            await until(lambda: len(pool.ready) == 1)
            assert pool.replicas[0].reason == "draining"
            for _ in range(4):
                await pool.embed(sequences_of(3), deadline=soon())
            assert not engines[0].seen

    asyncio.run(run())


def test_replicas_that_must_not_be_used_are_refused_with_the_reason(text_folder, tmp_path):
    async def run():
        good = card_for(text_folder)
        other = card_for(text_folder, model="other", max_tokens=64)

        def check(card, address):
            if card.dtype == "wrong":
                raise TokenizerMismatch("not this tokenizer")

        wrong = card_for(text_folder, dtype="wrong")
        async with pool_over(text_folder, tmp_path, good, other, wrong, check=check, up=False) as (pool, _):
            await until(lambda: all(replica.reason != "connecting" for replica in pool.replicas))
            await until(lambda: pool.replicas[2].reason == "refused: not this tokenizer")
            # Whichever of the two came first is what this front serves; the other is refused.
            await until(lambda: len(pool.ready) == 1 and any("this front serves" in r.reason for r in pool.replicas))
            await pool.embed(sequences_of(3), deadline=soon())

    asyncio.run(run())


def test_another_model_may_take_over_once_the_old_one_is_gone(text_folder, tmp_path):
    async def run():
        async with pool_over(text_folder, tmp_path, card_for(text_folder)) as (pool, (engine,)):
            await engine.__aexit__()
            await until(lambda: not pool.ready)
            assert pool.card.model == "tiny/embedder"
            async with FakeEngine(engine.path, card_for(text_folder, model="tiny/next")):
                await until(lambda: len(pool.ready) == 1)
                assert pool.card.model == "tiny/next"

    asyncio.run(run())


def test_before_any_replica_came_up_there_is_no_card(tmp_path):
    async def run():
        async with ReplicaPool([f"unix:{tmp_path}/nobody"], lambda card, address: None, Metrics()) as pool:
            with pytest.raises(Unavailable, match="no replica has come up yet"):
                _ = pool.card
            await until(lambda: "nothing listens there" in pool.replicas[0].reason)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("addresses", "words"),
    [([], "at least one"), (["nowhere"], "is not an address"), (["unix:/a", "unix:/a"], "given twice")],
)
def test_addresses_are_checked_before_anything_starts(addresses, words):
    with pytest.raises(StartupError, match=words):
        ReplicaPool(addresses, lambda card, address: None, Metrics())


def test_a_cancelled_answer_of_the_engine_is_passed_on(text_folder, tmp_path):
    async def run():
        async with pool_over(text_folder, tmp_path, card_for(text_folder)) as (pool, (engine,)):

            def fault(request):
                raise Cancelled("by the engine")

            engine.fault = fault
            with pytest.raises(Cancelled):
                await pool.embed(sequences_of(3), deadline=soon())

    asyncio.run(run())
