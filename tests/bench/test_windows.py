"""What is seen of a window: by clients that load a server, by meters of its engine, and where either hangs."""

from __future__ import annotations

import os
import socket
import sys
import time
from subprocess import Popen

import pytest

from rose.bench import carriers, fleet, load_client
from rose.bench.fleet import ClientFailedError, EmptyWindowError, run_fleet, window
from rose.bench.meter import Meter, Sample
from rose.errors import DeadlineExceeded
from tests.support.moved_clock import Clock


def test_a_window_counts_the_part_of_a_request_that_lies_within():
    spans = [(0.0, 2.0), (1.5, 1.75), (2.5, 4.5), (5.0, 6.0)]
    found = window(spans, 1.0, 3.5)
    assert found.requests == pytest.approx(0.5 + 1 + 0.5)
    assert list(found.seconds) == [2.0, 0.25], "percentiles are of those that ended within, wherever they began"
    assert found.longest == 2.0
    assert found.length == 2.5


def test_a_stall_over_either_edge_of_a_window_is_its_longest_request():
    quick = [(t / 10, (t + 1) / 10) for t in range(100)]
    over_the_begin = window([*quick[:20], (2.0, 5.0), *quick[50:]], 4.0, 8.0)
    assert (max(over_the_begin.seconds), over_the_begin.longest) == (3.0, 3.0)
    over_the_end = window([*quick[:70], (7.0, 10.0)], 4.0, 8.0)
    assert max(over_the_end.seconds) == pytest.approx(0.1)
    assert over_the_end.longest == 3.0
    assert window(quick, 4.0, 8.0).longest == pytest.approx(0.1)


def test_a_window_in_which_nothing_ended_is_an_error():
    with pytest.raises(EmptyWindowError, match=r"window of 1 s, the longest took 9\.00 s"):
        window([(0.0, 9.0)], 4.0, 5.0)


def test_requests_travel_to_a_client_byte_by_byte(tmp_path):
    sent = [b"", b"x" * 70_000, bytes(range(256))]
    load_client.write_requests(tmp_path / "r", sent)
    assert load_client.read_requests(tmp_path / "r") == sent


def test_a_client_sends_in_turn_until_the_end_and_notes_every_time():
    clock, seen = Clock(), []
    starts, ends = load_client.run(
        lambda one: seen.append(one) or clock.sleep(0.25), "ab", load_client.End(clock() + 1.125), clock
    )
    assert "".join(seen) == "ababa"
    assert starts == [100.0, 100.25, 100.5, 100.75, 101.0]
    assert ends == [*starts[1:], 101.25], "the last may take longer"


def test_a_client_runs_until_it_is_told_when_to_end_or_its_parent_is_gone():
    for told, most in ((f"{time.monotonic() + 0.02!r}\n".encode(), 5.0), (b"", 5.0)):
        source, sink = os.pipe()
        end = load_client.End()
        with os.fdopen(source, "rb", buffering=0) as reader:
            end.read_from(reader)
            assert end.at > time.monotonic() + 1e6, "until then for ever"
            os.write(sink, told)
            os.close(sink)
            began = time.monotonic()
            load_client.run(lambda one: time.sleep(0.001), "a", end)
        assert time.monotonic() - began < most


def test_a_client_that_cannot_connect_is_told_with_its_own_words(tmp_path):
    with pytest.raises(ClientFailedError, match="nothing listens"):
        run_fleet("link", f"unix:{tmp_path}/nobody", [[b""]], seconds=0.1)


def test_a_client_whose_engine_hangs_gives_up(monkeypatch):
    """Over any carrier: a request that is never answered ends its client."""
    monkeypatch.setattr(carriers, "REQUEST_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host, port = deaf.getsockname()
        for via, address in (
            ("link", f"{host}:{port}"),
            ("grpc", f"{host}:{port}"),
            ("http", f"http://{host}:{port}/v1"),
        ):
            prepare, send = load_client.connect(via, address)
            began = time.monotonic()
            with pytest.raises(Exception, match=r"(?i)deadline|timed out"):
                send(prepare(b""))
            assert time.monotonic() - began < 30


def test_a_client_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "REQUEST_S", 0.05)
    monkeypatch.setattr(fleet, "ENDING_S", 0.05)
    ran = []

    def popen(command, **how):
        hangs = "import sys, time; print('I hang', file=sys.stderr); print('ready', flush=True); time.sleep(600)"
        ran.append(Popen([sys.executable, "-c", hangs], **how))
        return ran[0]

    monkeypatch.setattr(fleet.subprocess, "Popen", popen)
    with pytest.raises(ClientFailedError, match="did not end:\nI hang"):
        run_fleet("link", "nobody", [[b""]], seconds=0.5)
    assert ran[0].poll() is not None


START = {
    "device_us": 1_000,
    "graph_hits": 5,
    "graph_plain": 1,
    "graph_captures": 1,
    "graph_new_keys": 1,
    "graph_failed": 0,
}
LATER = {
    "device_us": 51_000,
    "graph_hits": 11,
    "graph_plain": 2,
    "graph_captures": 2,
    "graph_new_keys": 2,
    "graph_failed": 0,
}


def test_a_meter_reads_both_ends_of_its_window():
    clock = Clock()
    asked = []
    meter = Meter(
        lambda: asked.append(clock()) or (START, LATER)[len(asked) - 1], nvml=False, clock=clock, sleep=clock.sleep
    )
    meter.watch(100.5, 100.75)
    assert asked == [100.5, pytest.approx(100.75)]
    assert meter.busy_share == pytest.approx(0.05 / 0.25)
    assert meter.graph_share == 0.75
    assert meter.first_runs == 2
    assert meter.gpu is None


def test_a_meter_tells_the_means_of_what_it_sampled():
    clock = Clock()
    samples = iter([Sample(1.0, 1980, 690.4), Sample(0.5, 1500, 700.4), Sample(0.0, 1500, 101.0)])
    meter = Meter(None, sample=lambda: next(samples), clock=clock, sleep=clock.sleep)
    meter.watch(100.0, 100.15)
    assert meter.gpu == Sample(0.75, 1740, 695)


@pytest.mark.parametrize("held_up", ["begin", "end", "both"])
def test_a_stall_at_an_end_of_a_window_costs_its_counters_alone(held_up):
    """The engine does not tell them within the time it is asked; what the clients measured is right nevertheless."""
    clock = Clock()
    asked = []

    def counters():
        asked.append(clock())
        if held_up in (("begin", "both"), ("end", "both"))[len(asked) - 1]:
            clock.sleep(10)
            raise DeadlineExceeded("no answer within 10 s")
        return (START, LATER)[len(asked) - 1]

    meter = Meter(counters, nvml=False, clock=clock, sleep=clock.sleep)
    meter.watch(101.0, 104.0)
    assert asked == [101.0, pytest.approx(111.0 if held_up != "end" else 104.0)]
    assert (meter.busy_share, meter.first_runs, meter.graph_share) == (None, None, 0.0)


def test_a_meter_of_a_server_without_counters():
    clock = Clock()
    meter = Meter(None, nvml=False, clock=clock, sleep=clock.sleep)
    meter.settle(1.0, 5.0)
    meter.watch(102.0, 103.0)
    assert clock() == pytest.approx(103.0)
    assert (meter.settled_s, meter.busy_share, meter.first_runs) == (1.0, None, None)
