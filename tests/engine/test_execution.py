"""Tickets, the CPU worker, and the descriptor that wakes its owner."""

from __future__ import annotations

import select
import threading
import time
from functools import partial

import pytest
import torch

from rose.engine.execution import CpuExecutor, DoneTicket, WakeUp, expected_end_after
from rose.errors import StartupError


@pytest.fixture
def executor():
    executor = CpuExecutor(num_threads=1)
    yield executor
    executor.close()


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def test_a_launch_returns_before_its_function_does(executor):
    gate = threading.Event()
    ticket = executor.launch(lambda: gate.wait(10) and 42)
    assert not ticket.ready()
    assert ticket.seconds() is None
    gate.set()
    assert ticket.result() == 42
    assert ticket.ready()
    assert ticket.seconds() > 0


def test_tickets_finish_in_the_order_of_their_launches(executor):
    order = []
    tickets = [executor.launch(lambda n=n: order.append(n)) for n in range(100)]
    tickets[-1].wait()
    assert order == list(range(100))
    assert all(ticket.ready() for ticket in tickets)


def test_an_error_surfaces_in_its_own_ticket_only(executor):
    """Report C140 (infinity#242): one failing batch ended the worker, and the server never answered again."""

    def fail(error: BaseException):
        raise error

    tickets = [executor.launch(lambda error=error: fail(error)) for error in (ValueError("bad"), SystemExit(3))]
    after = executor.launch(lambda: "fine")
    with pytest.raises(ValueError, match="bad"):
        tickets[0].result()
    with pytest.raises(SystemExit):
        tickets[1].result()
    assert tickets[0].seconds() is None
    assert after.result() == "fine"


def test_forwards_run_in_one_other_thread_without_gradients(executor):
    def look():
        return threading.get_ident(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    first, second = executor.launch(look).result(), executor.launch(look).result()
    assert first == second
    assert first[0] != threading.get_ident()
    assert first[1:] == (True, 1)
    assert not torch.is_inference_mode_enabled()


def test_the_descriptor_is_readable_once_something_has_finished(executor):
    gate = threading.Event()
    assert not readable(executor.fileno())
    ticket = executor.launch(gate.wait)
    assert not readable(executor.fileno(), 0.01)
    gate.set()
    assert readable(executor.fileno(), 10)
    executor.acknowledge()
    assert ticket.ready(), "readable means that a ticket is ready"
    assert not readable(executor.fileno())


def test_many_finishes_are_acknowledged_at_once(executor):
    executor.launch(lambda: None)
    for _ in range(1000):
        last = executor.launch(lambda: None)
    last.wait()
    assert readable(executor.fileno(), 10)
    time.sleep(0.01)  # the last wake-up follows its ticket
    executor.acknowledge()
    assert not readable(executor.fileno())


def test_a_failure_wakes_as_well(executor):
    executor.launch(lambda: 1 / 0)
    assert readable(executor.fileno(), 10)


def test_wake_up_works_over_a_pipe_too(monkeypatch):
    monkeypatch.delattr("os.eventfd", raising=False)
    wake_up = WakeUp()
    assert not readable(wake_up.fileno())
    for _ in range(20_000):  # more than a pipe holds: setting must never block
        wake_up.set()
    assert readable(wake_up.fileno())
    wake_up.clear()
    assert not readable(wake_up.fileno())
    wake_up.set()
    assert readable(wake_up.fileno())
    wake_up.close()


def test_closing_finishes_what_was_launched_and_refuses_more():
    executor = CpuExecutor()
    tickets = [executor.launch(lambda n=n: time.sleep(0.001) or n) for n in range(10)]
    executor.close()
    assert [ticket.result() for ticket in tickets] == list(range(10))
    with pytest.raises(RuntimeError, match="closed"):
        executor.launch(lambda: None)
    executor.close()


def test_callbacks_run_once_before_or_after_the_end(caplog):
    ticket: DoneTicket[int] = DoneTicket()
    calls: list[str] = []
    ticket.on_done(lambda: calls.append("early"))
    ticket.on_done(lambda: 1 / 0)
    ticket.on_done(lambda: calls.append("second"))
    assert calls == []
    ticket.settle(1)
    assert calls == ["early", "second"], "a callback that raises takes nobody with it"
    assert "callback" in caplog.text
    ticket.on_done(lambda: calls.append("late"))
    assert calls == ["early", "second", "late"]


def test_callbacks_from_many_threads_are_never_lost(executor):
    for _ in range(200):
        seen: list[int] = []
        gate = threading.Event()
        ticket = executor.launch(gate.wait)
        threads = [threading.Thread(target=ticket.on_done, args=(partial(seen.append, 1),)) for _ in range(4)]
        for thread in threads[:2]:
            thread.start()
        gate.set()
        for thread in threads[2:]:
            thread.start()
        for thread in threads:
            thread.join()
        executor.launch(lambda: None).wait()  # the callbacks of the first ran before
        assert seen == [1] * 4


def test_the_expected_end_counts_from_the_end_of_what_runs_before():
    assert expected_end_after(None, None) is None
    running: DoneTicket[None] = DoneTicket(expected_end=time.monotonic() + 100)
    assert expected_end_after(running, 5.0) == pytest.approx(time.monotonic() + 105, abs=1)
    running.settle(None)
    assert expected_end_after(running, 5.0) == pytest.approx(time.monotonic() + 5, abs=1), "it ended early"
    late: DoneTicket[None] = DoneTicket(expected_end=time.monotonic() - 100)
    assert expected_end_after(late, 5.0) == pytest.approx(time.monotonic() + 5, abs=1), "it is overdue"


def test_launches_carry_their_expected_end(executor):
    gate = threading.Event()
    first = executor.launch(gate.wait, expected_seconds=10)
    second = executor.launch(gate.wait, expected_seconds=1)
    assert second.expected_end == pytest.approx(first.expected_end + 1)
    assert executor.launch(gate.wait).expected_end is None
    gate.set()


@pytest.mark.parametrize("threads", [0, -1])
def test_a_worker_without_threads_is_refused(threads):
    with pytest.raises(StartupError, match="at least one thread"):
        CpuExecutor(num_threads=threads)
