"""Plain, capture, replay; budget, eviction, failure: policy on the CPU with a capturer that pretends."""

from __future__ import annotations

import pytest
import torch

from rose.attention_backends.workspace import WorkspaceFull
from rose.engine.buckets import GraphKey
from rose.engine.graphs import COLD_AFTER, LazyGraphs

CPU = torch.device("cpu")


def key(tokens: int, **kwargs) -> GraphKey:
    return GraphKey(tokens, 1, 64, ("e",), padded=True, **kwargs)


class FakeGraph:
    """Replays by running the captured function again, as the device would, into outputs that stay in place."""

    def __init__(self, fn, nbytes: int) -> None:
        self._fn = fn
        self.outputs = {"e": torch.full((1,), torch.nan)}
        self.bytes = nbytes
        self.replays = 0
        self.released = False

    def replay(self) -> None:
        assert not self.released
        self.replays += 1
        self.outputs["e"].copy_(self._fn()["e"])

    def release(self) -> None:
        assert not self.released
        self.released = True


class FakeCapturer:
    def __init__(self, nbytes: int = 100) -> None:
        self.nbytes = nbytes
        self.graphs: list[tuple[GraphKey, FakeGraph]] = []
        self.error: Exception | None = None

    def capture(self, key, fn):
        if self.error is not None:
            raise self.error
        self.graphs.append((key, FakeGraph(fn, self.nbytes)))
        return self.graphs[-1][1]


class Sum:
    """Sums its inputs; remembers under which key it was loaded."""

    def __init__(self) -> None:
        self.loads: list[GraphKey | None] = []
        self.full = False
        self.capturable = True

    def load(self, packed, graph_key, like=None):
        if self.full and graph_key is not None:
            raise WorkspaceFull("no room for one more plan")
        self.packed = packed
        self.loads.append(graph_key)

    def run(self):
        return {"e": self.packed.sum(dtype=torch.float32).reshape(1)}


def run(graphs: LazyGraphs, key: GraphKey, number: int, forward: Sum | None = None) -> float:
    inputs = torch.tensor([number, 1], dtype=torch.int32)
    return float(graphs.run(key, inputs, forward or Sum())["e"])


def make(capturer: FakeCapturer | None, max_bytes: int = 1 << 20) -> tuple[LazyGraphs, list[GraphKey]]:
    graphs = LazyGraphs(CPU, capturer=capturer, max_bytes=max_bytes)
    released: list[GraphKey] = []
    graphs.on_release(released.append)
    return graphs, released


def test_a_plan_bound_to_one_split_is_never_captured() -> None:
    capturer = FakeCapturer()
    graphs, released = make(capturer)
    forward = Sum()
    forward.capturable = False
    for number in range(4):
        assert run(graphs, key(64), number, forward) == number + 1
    assert graphs.metrics.hits == graphs.metrics.captures == 0
    assert graphs.metrics.failed == 1
    assert released == [key(64)]


def test_a_plan_that_is_the_same_for_all_of_a_key_is_not_made_again_for_replays():
    graphs, _ = make(FakeCapturer())
    forward = Sum()
    forward.fixed = True
    assert [run(graphs, key(64), n, forward) for n in (5, 6, 7, 8)] == [6, 7, 8, 9]
    assert forward.loads == [key(64)] * 2
    assert run(graphs, key(64), 9, Sum()) == 10, "what was captured counts, not who asks"


def test_first_plain_then_capture_then_replay():
    graphs, _ = make(FakeCapturer())
    assert [run(graphs, key(64), n) for n in (5, 6, 7, 8)] == [6, 7, 8, 9]
    metrics = graphs.metrics
    assert (metrics.plain, metrics.new_keys, metrics.captures, metrics.hits) == (1, 1, 1, 2)
    assert metrics.bytes == 100 + 8
    assert key(64) in graphs


def test_what_is_cleared_is_earned_anew():
    capturer = FakeCapturer()
    graphs, released = make(capturer)
    for number in range(3):
        run(graphs, key(64), number)
        run(graphs, key(128), number)
    graphs.clear()
    assert [graph.released for _, graph in capturer.graphs] == [True, True]
    assert sorted(released) == [key(64), key(128)]
    assert graphs.metrics.bytes == 0
    assert [run(graphs, key(64), n) for n in (5, 6, 7)] == [6, 7, 8]
    assert (graphs.metrics.captures, graphs.metrics.hits, graphs.metrics.evicted) == (3, 3, 0)


def test_every_hit_of_a_key_is_planned_under_it_and_replays_read_the_same_buffers():
    graphs, _ = make(FakeCapturer())
    forward = Sum()
    places = []
    for number in range(4):
        run(graphs, key(64), number, forward)
        places.append(forward.packed.data_ptr())
    assert forward.loads == [key(64)] * 4
    assert len(set(places[1:])) == 1


def test_replays_are_told_which_forward_saw_their_buffer_first():
    graphs, _ = make(FakeCapturer())
    liked = []

    class Watching(Sum):
        def load(self, packed, graph_key, like=None):
            liked.append((like, like is None or like.packed.data_ptr() == packed.data_ptr()))
            super().load(packed, graph_key)

    forwards = [Watching() for _ in range(4)]
    for number, forward in enumerate(forwards):
        run(graphs, key(64), number, forward)
    assert liked == [(None, True), (None, True), (forwards[1], True), (forwards[1], True)]


def test_keys_do_not_share_buffers():
    graphs, _ = make(FakeCapturer())
    for number in range(3):
        for tokens in (64, 128):
            assert run(graphs, key(tokens), number + tokens) == number + tokens + 1


@pytest.mark.parametrize(
    ("capturer", "max_bytes", "which"),
    [(None, 1 << 20, key(64)), (FakeCapturer(), 0, key(64)), (FakeCapturer(), 1 << 20, GraphKey(5, 1, 64, ("e",)))],
    ids=["no capturer", "no budget", "a batch of its own shape"],
)
def test_all_else_runs_plain_for_ever_and_makes_no_plan_to_keep(capturer, max_bytes, which):
    graphs, released = make(capturer, max_bytes)
    forward = Sum()
    assert [run(graphs, which, n, forward) for n in range(4)] == [1, 2, 3, 4]
    assert (graphs.metrics.plain, graphs.metrics.new_keys) == (4, 1)
    assert forward.loads == [None] * 4
    assert released == []


def test_the_inputs_are_never_the_buffer_a_plain_run_reads():
    """The host buffer is written again as soon as its batch is over; a kernel may not look at it later."""
    graphs, _ = make(None)
    forward = Sum()
    inputs = torch.tensor([1, 1], dtype=torch.int32)
    graphs.run(key(64), inputs, forward)
    assert forward.packed.data_ptr() != inputs.data_ptr()


def test_the_budget_holds_and_cold_graphs_make_room():
    capturer = FakeCapturer(100)
    graphs, released = make(capturer, max_bytes=3 * 108)
    for tokens in (64, 128, 192):
        run(graphs, key(tokens), 0)
        run(graphs, key(tokens), 0)
    run(graphs, key(64), 0)  # the coldest is now 128
    for _ in range(COLD_AFTER):
        run(graphs, key(64), 1)
    run(graphs, key(256), 0)
    assert run(graphs, key(256), 41) == 42
    assert graphs.metrics.evicted == 1
    assert released == [key(128)]
    assert [graph.released for captured, graph in capturer.graphs] == [False, True, False, False]
    assert graphs.metrics.bytes == 3 * 108
    assert all(key(tokens) in graphs for tokens in (64, 192, 256))
    assert run(graphs, key(128), 1) == 2, "an evicted key starts over, plain"
    assert graphs.metrics.captures == 4


def test_more_busy_keys_than_fit_do_not_evict_each_other_in_turn():
    """At 6 to 20 ms a capture that would cost more than it gives; the surplus runs plain."""
    graphs, _ = make(FakeCapturer(100), max_bytes=2 * 108)
    for _ in range(50):
        for tokens in (64, 128, 192, 256):
            assert run(graphs, key(tokens), tokens) == tokens + 1
    metrics = graphs.metrics
    assert (metrics.captures, metrics.evicted, metrics.failed) == (2, 0, 0)
    assert metrics.plain + metrics.hits + metrics.captures == 200


def test_a_graph_larger_than_the_whole_budget_is_not_kept_and_not_tried_again():
    capturer = FakeCapturer(10_000)
    graphs, released = make(capturer, max_bytes=5000)
    assert [run(graphs, key(64), n) for n in range(5)] == [1, 2, 3, 4, 5]
    assert (graphs.metrics.failed, graphs.metrics.bytes, graphs.metrics.plain) == (1, 0, 5)
    assert len(capturer.graphs) == 1
    assert capturer.graphs[0][1].released
    assert released == [key(64)]


def test_out_of_memory_at_capture_runs_plain_and_keeps_serving():
    """Report C132 (vllm#49224): graph memory was not counted, and running out of it at capture ended the server."""
    capturer = FakeCapturer(100)
    graphs, released = make(capturer)
    for number in range(3):
        run(graphs, key(64), number)
    capturer.error = torch.OutOfMemoryError("CUDA out of memory")
    forward = Sum()
    assert [run(graphs, key(128), n, forward) for n in range(4)] == [1, 2, 3, 4]
    assert graphs.metrics.failed == 1
    assert released == [key(128)]
    assert forward.loads == [key(128), key(128), None, None, None], "once tried, it is planned as a plain batch"
    capturer.error = None
    assert [run(graphs, key(192), n) for n in range(4)] == [1, 2, 3, 4]
    assert key(192) not in graphs, "what was held when memory ran out is all there is room for"
    assert run(graphs, key(64), 9) == 10
    for _ in range(COLD_AFTER):
        run(graphs, key(192), 0)
    assert key(192) in graphs, "but a cold graph still makes room"
    assert graphs.metrics.bytes == 108


def test_out_of_memory_at_the_first_capture_means_no_graphs():
    capturer = FakeCapturer()
    capturer.error = torch.OutOfMemoryError("CUDA out of memory")
    graphs, _ = make(capturer)
    for tokens in (64, 128, 192):
        assert [run(graphs, key(tokens), n) for n in range(3)] == [1, 2, 3]
    assert graphs.metrics.failed == 1, "one try was enough"
    assert graphs.metrics.captures == 0


def test_what_cannot_be_captured_runs_plain_without_a_word_to_the_caller():
    capturer = FakeCapturer()
    graphs, _ = make(capturer)
    run(graphs, key(64), 0)
    capturer.error = RuntimeError("operation not permitted when stream is capturing")
    assert [run(graphs, key(64), n) for n in range(5)] == [1, 2, 3, 4, 5]
    assert graphs.metrics.failed == 2
    capturer.error = None
    assert [run(graphs, key(64), n) for n in range(3)] == [1, 2, 3]
    assert key(64) not in graphs, "twice is enough"
    run(graphs, key(128), 0)
    run(graphs, key(128), 0)
    assert key(128) in graphs


def test_no_memory_for_a_plan_means_plain_without_a_key():
    graphs, released = make(FakeCapturer())
    forward = Sum()
    forward.full = True
    assert [run(graphs, key(64), n, forward) for n in range(3)] == [1, 2, 3]
    assert forward.loads == [None] * 3
    assert released == [key(64)]
    assert graphs.metrics.failed == 1


def test_a_forward_that_raises_raises_and_the_key_goes_on():
    graphs, _ = make(FakeCapturer())
    run(graphs, key(64), 0)
    run(graphs, key(64), 0)

    class Broken(Sum):
        def load(self, packed, graph_key, like=None):
            raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        run(graphs, key(64), 1, Broken())
    with pytest.raises(ArithmeticError):
        run(graphs, key(128), 1, Broken())
    assert run(graphs, key(64), 2) == 3
    assert run(graphs, key(128), 2) == 3


def test_a_replay_that_fails_is_the_last_of_its_graph():
    """The batch hears of it; tried again, it runs plain, and its plan's memory serves others."""
    capturer = FakeCapturer()
    graphs, released = make(capturer)
    for _ in range(2):
        run(graphs, key(64), 0)
        run(graphs, key(128), 0)
    graph = capturer.graphs[0][1]
    graph.replay = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        run(graphs, key(64), 1)
    assert graph.released
    assert released == [key(64)]
    assert (key(64) in graphs, key(128) in graphs) == (False, True)
    assert (graphs.metrics.failed, graphs.metrics.bytes) == (1, graphs._held[key(128)].bytes)
    plain = graphs.metrics.plain
    assert run(graphs, key(64), 4) == 5
    assert graphs.metrics.plain == plain + 1
    assert run(graphs, key(128), 7) == 8


class Flaky(Sum):
    """No memory on the host for its plan."""

    def load(self, packed, graph_key, like=None):
        raise MemoryError("for a moment")


def test_a_passing_error_of_a_replay_costs_one_capture_and_the_second_is_the_last(caplog):
    capturer = FakeCapturer()
    graphs, released = make(capturer)
    for number in range(3):
        run(graphs, key(64), number)
    with pytest.raises(MemoryError):
        run(graphs, key(64), 5, Flaky())
    assert "no graph for 64 tokens in 1 sequences for now: its replay failed: MemoryError: for a moment" in caplog.text
    forward = Sum()
    hits = graphs.metrics.hits
    assert [run(graphs, key(64), n, forward) for n in range(50)] == [n + 1 for n in range(50)]
    assert (graphs.metrics.hits - hits, graphs.metrics.plain, graphs.metrics.captures) == (48, 2, 2)
    assert forward.loads == [key(64)] * 50, "planned anew outside of the capture, as on a first hit"
    assert graphs.metrics.bytes == 108

    with pytest.raises(MemoryError):
        run(graphs, key(64), 5, Flaky())
    assert "it runs plain: for the second time its replay failed: MemoryError: for a moment" in caplog.text
    hits = graphs.metrics.hits
    assert [run(graphs, key(64), n) for n in range(50)] == [n + 1 for n in range(50)]
    assert (graphs.metrics.hits, graphs.metrics.captures, graphs.metrics.failed) == (hits, 2, 2)
    assert graphs.metrics.bytes == 0
    assert released == [key(64)] * 2
    assert [graph.released for _, graph in capturer.graphs] == [True, True]


def test_a_passing_error_of_a_capture_does_not_end_graphs_of_its_key(caplog):
    capturer = FakeCapturer()
    graphs, released = make(capturer)
    run(graphs, key(64), 0)
    capturer.error = RuntimeError("another thread has synchronised")
    forward = Sum()
    assert run(graphs, key(64), 1, forward) == 2
    assert forward.loads == [key(64), None], "what failed under the key is not tried again for this batch"
    assert released == [key(64)]
    assert "for now: its capture failed: RuntimeError: another thread has synchronised" in caplog.text
    capturer.error = None
    assert [run(graphs, key(64), n, forward) for n in range(4)] == [1, 2, 3, 4]
    assert forward.loads[2:] == [key(64)] * 4
    assert (graphs.metrics.captures, graphs.metrics.hits, graphs.metrics.failed) == (1, 2, 1)


def test_a_graph_whose_very_first_replay_fails_is_given_up_as_well():
    capturer = FakeCapturer()
    graphs, released = make(capturer)
    run(graphs, key(64), 0)
    broken = Sum()
    broken.run = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        run(graphs, key(64), 0, broken)
    assert (key(64) in graphs, graphs.metrics.bytes, released) == (False, 0, [key(64)])
    assert capturer.graphs[0][1].released
    assert [run(graphs, key(64), n) for n in range(4)] == [1, 2, 3, 4]
    assert graphs.metrics.hits == 2


def test_keys_seen_once_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr("rose.engine.graphs.MAX_COUNTED", 10)
    graphs, released = make(FakeCapturer())
    for tokens in range(64, 64 * 31, 64):
        run(graphs, key(tokens), 0)
    assert released == [key(tokens) for tokens in range(64, 64 * 21, 64)]
