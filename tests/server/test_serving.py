"""Requests over a real socket, to a fake engine: answers, order, faults, deadlines, cancels."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rose.client import Client
from rose.errors import (
    DeadlineExceeded,
    InternalError,
    NonFinite,
    Unavailable,
)
from rose.proto import rose_pb2 as pb
from rose.proto.frames import FrameType, encode_frame
from tests.server.fake_engine import (
    NAN,
    POISON,
    SPOILS,
    FakeEngine,
    int8_row,
    plain_row,
    token_rows,
    unit_row,
)
from tests.server.running_server import RawPeer, serving


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/link.sock"


def sequences_of(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 600, size=n).astype(np.int32) for n in lengths]


def test_every_output_over_either_kind_of_socket(address):
    sequences = sequences_of([3, 1, 40, 200, 7])
    with serving(FakeEngine(), address) as server, Client(server.address) as client:
        result = client.embed(sequences, outputs=["plain", "unit", "tokens", "int8"])
        np.testing.assert_array_equal(result.outputs["plain"], [plain_row(ids) for ids in sequences])
        np.testing.assert_allclose(result.outputs["unit"], [unit_row(ids) for ids in sequences], rtol=1e-6)
        np.testing.assert_array_equal(result.outputs["int8"], [int8_row(ids) for ids in sequences])
        for i, ids in enumerate(sequences):
            np.testing.assert_array_equal(result.item("tokens", i), token_rows(ids))
        assert result.prompt_tokens == 251
        assert list(result.outputs) == ["plain", "unit", "tokens", "int8"]


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_texts_of_very_different_lengths_keep_their_order(seed):
    """Report C12 (ollama#6187): vectors right, order wrong, as soon as batches are sorted by length."""
    lengths = np.random.default_rng(seed).choice([1, 2, 5, 17, 64, 130, 256], size=200)
    sequences = sequences_of(lengths, seed)
    with serving(FakeEngine(shuffle=seed)) as server, Client(server.address) as client:
        result = client.embed(sequences, outputs=["plain", "tokens"])
        np.testing.assert_array_equal(result.outputs["plain"], [plain_row(ids) for ids in sequences])
        for i, ids in enumerate(sequences):
            np.testing.assert_array_equal(result.item("tokens", i), token_rows(ids))
        assert result.timing.batches == len(server.engine.batches) > 20


def test_many_clients_and_many_requests_at_once_each_get_their_own():
    with serving(FakeEngine(shuffle=1)) as server:
        failures = []

        def use(seed: int) -> None:
            with Client(server.address) as client:
                for turn in range(30):
                    sequences = sequences_of([1 + (seed * turn) % 50, 3], seed * 100 + turn)
                    rows = client.embed(sequences).vectors
                    if not np.array_equal(rows, [plain_row(ids) for ids in sequences]):
                        failures.append((seed, turn))

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_timing_tells_queue_and_compute_apart():
    with serving(FakeEngine(held=True)) as server, RawPeer(server.address) as peer:
        peer.request(1, [[1] * 64])
        peer.request(2, [[2] * 64])
        peer.request(3, [[3] * 64])
        server.engine.wait_for_batches(2)
        time.sleep(0.05)
        server.engine.finish()
        server.engine.wait_for_batches(3)
        server.engine.release()
        timings = [pb.EmbedResponse.FromString(peer.frame().payload).timing for _ in range(3)]
    assert timings[0].queue_us < 40_000 < timings[0].compute_us
    assert timings[2].queue_us > 40_000 > timings[2].compute_us
    assert [timing.batches for timing in timings] == [1, 1, 1]


# Faults


def test_a_row_that_is_not_finite_is_an_error_of_its_item_only():
    """Report C26 (vllm#19661, dify#11827): NaN broke the whole answer with a message about JSON."""
    with serving(FakeEngine(batch_tokens=200, held=True)) as server, RawPeer(server.address) as peer:
        peer.request(9, [[1] * 200])  # holds the engine until the others wait together
        peer.request(8, [[1] * 200])
        server.engine.wait_for_batches(2)
        peer.request(1, [[1, 2], [3]])
        peer.request(2, [[4], [5, NAN, 6], [7]])
        peer.request(3, [[8, 9]])
        with Client(server.address) as client:
            while client.stats().queued_requests < 3:
                time.sleep(0.002)
            server.engine.release()
            answers = [peer.frame() for _ in range(5)]
            by_id = {frame.request_id: frame for frame in answers}
            assert by_id[1].type is by_id[3].type is FrameType.EMBED_RESULT
            assert len(server.engine.batches[2]) == 6, "one batch held them all"
            error = pb.Error.FromString(by_id[2].payload)
            assert (error.kind, error.index) == ("non_finite", 1)
            assert "item 1 is not finite" in error.message
            stats = client.stats()
            assert stats.errors_total["non_finite"] == 1
            assert stats.answered_total == 4
    vectors = pb.EmbedResponse.FromString(by_id[3].payload).outputs[0].values.data
    np.testing.assert_array_equal(np.frombuffer(vectors, dtype="<f4"), plain_row([8, 9]))


def test_an_item_that_spoils_its_company_alone_spoils_nobody():
    sequences = [[1], [SPOILS, 2], [3, 4]]
    with serving(FakeEngine()) as server, Client(server.address) as client:
        np.testing.assert_array_equal(client.embed(sequences).vectors, [plain_row(ids) for ids in sequences])
        assert client.stats().retried_items_total == 3
        assert [len(batch) for batch in server.engine.batches] == [3, 1, 1, 1]
        assert all(request.alone for request in server.engine.added[1:])


def test_what_cannot_be_run_again_is_answered_with_an_error(monkeypatch):
    with serving(FakeEngine()) as server, Client(server.address) as client:
        add = server.engine.add

        def refuse_alone(request):
            if request.alone:
                raise MemoryError("no room to run it again")
            add(request)

        monkeypatch.setattr(server.engine, "add", refuse_alone)
        with pytest.raises(InternalError, match="could not be run again"):
            client.embed([[1], [SPOILS, 2]], deadline_s=5)
        np.testing.assert_array_equal(client.embed([[4, 5]]).vectors, [plain_row([4, 5])])
        assert client.stats().open_requests == 0


@pytest.mark.parametrize("output", ["plain", "unit", "tokens"])
def test_non_finite_values_of_any_output_are_found(output):
    with serving() as server, Client(server.address) as client:
        with pytest.raises(NonFinite) as caught:
            client.embed([[1, 2], [3, NAN, 4]], outputs=["int8", output])
        assert caught.value.index == 1
        np.testing.assert_array_equal(client.embed([[3, NAN, 4]], outputs=["int8"]).vectors, [int8_row([3, NAN, 4])])


def test_a_forward_that_raises_fails_the_item_at_fault_and_nothing_else():
    """Report C140 (infinity#242): one failing batch killed the worker, and nothing was answered any more."""
    with serving(FakeEngine(batch_tokens=100)) as server, Client(server.address) as client:
        with pytest.raises(InternalError, match="item 2: ArithmeticError: this batch holds poison") as caught:
            client.embed([[1], [2], [POISON], [3]])
        assert type(caught.value) is InternalError
        assert caught.value.index == 2
        for _ in range(3):
            with pytest.raises(InternalError):
                client.embed([[POISON]])
            np.testing.assert_array_equal(client.embed([[4, 5]]).vectors, [plain_row([4, 5])])
        stats = client.stats()
        assert stats.failed_batches_total >= 5
        assert stats.errors_total["internal_error"] == 4
        assert stats.open_requests == stats.queued_requests == stats.batches_in_flight == 0


def test_company_of_a_failing_request_is_answered():
    """Report C140 (infinity#242): the others of the batch are run again and never hear of it."""
    with serving(FakeEngine(batch_tokens=100, held=True)) as server, RawPeer(server.address) as peer:
        for request_id in (7, 8):
            peer.request(request_id, [[1] * 100])
        server.engine.wait_for_batches(2)
        peer.request(1, [[1, 2], [3]])
        peer.request(2, [[POISON]])
        peer.request(3, [[5]])
        with Client(server.address) as client:
            while client.stats().queued_requests < 3:
                time.sleep(0.002)
        server.engine.release()
        frames = {frame.request_id: frame for frame in (peer.frame() for _ in range(5))}
        assert len(server.engine.batches[2]) == 4
    assert [frames[i].type for i in (1, 2, 3)] == [FrameType.EMBED_RESULT, FrameType.ERROR, FrameType.EMBED_RESULT]


def test_an_engine_whose_step_raises_leaves_nobody_waiting():
    engine = FakeEngine()
    with serving(engine) as server, Client(server.address) as client:
        engine.step_error = RuntimeError("the staging buffer is gone")
        with pytest.raises(InternalError, match="staging buffer is gone"):
            client.embed([[1]])
        np.testing.assert_array_equal(client.embed([[2]]).vectors, [plain_row([2])])


def test_a_lost_device_ends_the_process_and_everybody_is_told():
    with serving(FakeEngine(held=True), device_alive=lambda: False) as server, RawPeer(server.address) as peer:
        peer.request(1, [[POISON]])
        server.engine.wait_for_batches(1)
        peer.request(2, [[1]])
        server.engine.wait_for_batches(2)
        server.engine.finish()
        told = dict(peer.error() for _ in range(2))
        assert type(told[1]) is InternalError
        assert type(told[2]) is Unavailable
        assert "device is lost" in told[2].message
        assert peer.at_end()
        assert server.join(5) == 70


# Deadlines and cancels


def test_work_nobody_waits_for_any_more_is_never_run():
    """Report C148 (infinity#546): a thousand requests that expire in the queue are dropped before batching."""
    with serving(FakeEngine(batch_tokens=8, held=True)) as server, RawPeer(server.address) as peer:
        for request_id in (1, 2):
            peer.request(request_id, [[1] * 8])
        server.engine.wait_for_batches(2)
        for request_id in range(10, 1010):
            peer.request(request_id, [[2] * 8], deadline_ms=100)
        started = time.monotonic()
        for _ in range(1000):
            _, error = peer.error()
            assert type(error) is DeadlineExceeded
            assert "in the queue" in error.message
        assert time.monotonic() - started < 5
        with Client(server.address) as client:
            stats = client.stats()
            assert (stats.queued_requests, stats.queued_tokens) == (0, 0)
            assert stats.errors_total["deadline_exceeded"] == 1000
        server.engine.release()
        assert {peer.frame().request_id for _ in range(2)} == {1, 2}
        assert len(server.engine.batches) == 2


def test_a_deadline_also_ends_the_wait_for_a_batch_that_runs():
    with serving(FakeEngine(held=True)) as server, RawPeer(server.address) as peer:
        peer.request(1, [[1]], deadline_ms=50)
        request_id, error = peer.error()
        assert (request_id, type(error)) == (1, DeadlineExceeded)
        server.engine.release()
        peer.request(1, [[2]])
        assert peer.frame().type is FrameType.EMBED_RESULT


def test_a_request_within_its_deadline_is_answered():
    with serving() as server, Client(server.address) as client:
        assert client.embed([[1]], deadline_s=5.0).vectors.shape == (1, 8)


def test_cancel_ends_a_request_and_frees_its_place():
    with serving(FakeEngine(batch_tokens=4, held=True)) as server, RawPeer(server.address) as peer:
        peer.request(1, [[1] * 4] * 50)
        server.engine.wait_for_batches(2)
        peer.send(
            encode_frame(FrameType.CANCEL, 1) + encode_frame(FrameType.CANCEL, 1) + encode_frame(FrameType.CANCEL, 99)
        )
        request_id, error = peer.error()
        assert (request_id, error.kind) == (1, "cancelled")
        server.engine.release()
        peer.request(1, [[5]])
        assert peer.frame().type is FrameType.EMBED_RESULT
        assert len(server.engine.batches) == 3


def test_a_client_that_leaves_takes_its_work_along():
    """Report C149 (vllm#10806, vllm#54947): a killed client's 2,000 items went on running."""
    with serving(FakeEngine(batch_tokens=4, held=True)) as server:
        with RawPeer(server.address) as peer:
            peer.request(1, [[1] * 4] * 2000)
            server.engine.wait_for_batches(2)
        with Client(server.address) as client:
            end = time.monotonic() + 5
            while client.stats().open_requests:
                assert time.monotonic() < end
                time.sleep(0.002)
            assert client.stats().errors_total["cancelled"] == 1
            assert client.stats().connections == 1
            server.engine.release()
            client.embed([[1]])
        assert len(server.engine.batches) <= 4, "at most one more step after the client had gone"


def test_a_stuck_device_is_told_and_a_busy_one_is_not():
    """Report C140 (infinity#242): a worker that never answers again must not look ready; busy (sglang#22511) is."""
    with (
        serving(FakeEngine(held=True), stuck_seconds=0.2) as server,
        RawPeer(server.address) as peer,
        Client(server.address) as client,
    ):
        peer.request(1, [[1]])
        server.engine.wait_for_batches(1)
        client.info()
        time.sleep(0.25)
        with pytest.raises(Unavailable, match="seems stuck"):
            client.info()
        with pytest.raises(Unavailable, match="seems stuck"):
            client.embed([[1]])
        assert client.stats().batches_in_flight == 1
        server.engine.release()
        assert peer.frame().type is FrameType.EMBED_RESULT
        client.info()
