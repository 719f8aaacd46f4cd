"""The CUDA executor's books, without a device: which events are recorded when, and when they may serve again."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from rose.engine.cuda import CudaExecutor


class FakeDevice:
    """Events finish in the order of their recording, when `run` says so."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.recorded: list[FakeEvent] = []
        self.made = 0
        self.switches = 0
        self.current: object = "default"

    def run(self, events: int, each_ms: float = 2.0) -> None:
        for event in self.recorded[:events]:
            self.clock += each_ms
            event.at, event.done = self.clock, True
            event.finished.set()
        del self.recorded[:events]


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        device.made += 1
        self.device = device
        self.done = True
        self.at = 0.0
        self.finished = threading.Event()

    def record(self, stream: object) -> None:
        assert self.done, "an event that is still awaited is recorded anew"
        self.done = False
        self.finished.clear()
        self.device.recorded.append(self)

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        assert self.finished.wait(5)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()

    @contextlib.contextmanager
    def stream(chosen):
        fake.switches += 1
        before, fake.current = fake.current, chosen
        yield
        fake.current = before

    class FakeStream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return fake


@pytest.fixture
def executor(device):
    executor = CudaExecutor("cuda:0")
    yield executor
    device.run(len(device.recorded))
    executor.close()


def test_events_serve_again_once_their_time_was_read(device, executor):
    for number in range(50):
        ticket = executor.launch(lambda number=number: number)
        assert not ticket.ready()
        assert ticket.seconds() is None
        device.run(2)
        assert ticket.seconds() == pytest.approx(2e-3)
        assert ticket.result() == number
    assert device.made == 2


def test_a_ticket_whose_events_serve_another_batch_still_answers(device, executor):
    first = executor.launch(lambda: "first")
    device.run(2, each_ms=3.0)
    assert first.seconds() == pytest.approx(3e-3)
    second = executor.launch(lambda: "second")
    assert (first.ready(), first.result(), first.seconds()) == (True, "first", pytest.approx(3e-3))
    first.wait()
    called = []
    first.on_done(lambda: called.append(1))
    assert called == [1]
    assert not second.ready()


def test_two_in_flight_have_events_of_their_own(device, executor):
    tickets = [executor.launch(lambda n=n: n) for n in range(2)]
    assert device.made == 4
    device.run(2)
    assert [ticket.ready() for ticket in tickets] == [True, False]
    device.run(2)
    assert [ticket.result() for ticket in tickets] == [0, 1]


def test_events_that_another_thread_waits_for_are_never_given_back(device, executor):
    ticket = executor.launch(lambda: 1)
    called = threading.Event()
    ticket.on_done(called.set)
    device.run(2)
    assert called.wait(5)
    assert ticket.seconds() is not None
    executor.launch(lambda: 2)
    assert device.made == 4


def test_a_launch_that_raises_fails_its_own_ticket_only(device, executor):
    def fail():
        raise ArithmeticError("no")

    failed, good = executor.launch(fail), executor.launch(lambda: 3)
    with pytest.raises(ArithmeticError):
        failed.result()
    device.run(3)
    assert good.result() == 3


def test_an_owner_switches_streams_once(device, executor):
    seen = []

    def look() -> None:
        seen.append((device.current is executor.stream, torch.is_inference_mode_enabled()))

    for _ in range(3):
        executor.launch(look)
    assert device.switches == 3
    with executor.owner():
        for _ in range(3):
            executor.launch(look)
        with torch.inference_mode(False):
            executor.launch(look)
    assert device.switches == 5, "once for the owner, once for whoever left inference mode inside"
    assert seen == [(True, True)] * 7
    assert not torch.is_inference_mode_enabled()
