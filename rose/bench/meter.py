"""When a window may begin, and how busy a device was in it: by the engine's counters, and by NVML where it is there.

The engine's share counts from a batch's first to its last event, gaps between its kernels included; NVML's counts the
samples in which any kernel ran. NVML also tells how fast it was clocked, and on what power: products at full rate reach
an H200's 700 W. Knows counters; knows neither loads nor carriers.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rose.bench.steady import await_steady, first_runs
from rose.errors import DeadlineExceeded

SAMPLE_S = 0.1
# Every batch is one of these.
RUNS = ("graph_hits", "graph_plain", "graph_captures")
Counters = Mapping[str, int]


class Sample(NamedTuple):
    """What NVML tells of a device: share of its sampling time with any kernel, clock of its multiprocessors, power."""

    util: float
    mhz: float
    watts: float


class Meter:
    """Reads counters until a window may begin and at both ends of it, and samples in between; one window a meter.

    An engine that is held up at an end for longer than it is asked tells nothing of this window; what the clients saw
    of it stands.

    Attributes:
        settled_s: under load until the window might begin.
        first_runs: batches of the window that were the first, or the first captured, of their shape; None without
            counters of both ends.
        busy_share: device seconds of the engine's batches over the clock's, or None without counters.
        graph_share: batches replayed from a graph, of all; 0 without counters.
        gpu: the samples' mean, or None without NVML.
    """

    def __init__(
        self,
        counters: Callable[[], Counters] | None,
        *,
        nvml: bool = True,
        sample: Callable[[], Sample] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            counters: the engine's own; None for a server that tells none.
            sample: reads the device in NVML's place.
        """
        self._counters = counters
        self._clock = clock
        self._sleep = sleep
        self._sample = sample or (_nvml() if nvml else None)
        self.settled_s: float | None = None
        self.first_runs: int | None = None
        self.busy_share: float | None = None
        self.graph_share = 0.0
        self.gpu: Sample | None = None

    def settle(self, quiet_s: float, limit_s: float) -> None:
        """Wait, under load, for what `await_steady` waits for.

        Raises:
            NotSteadyError: it did not come.
        """
        self.settled_s = round(await_steady(self._counters, quiet_s, limit_s, clock=self._clock, sleep=self._sleep), 2)

    def watch(self, begin: float, end: float) -> None:
        """Wait for the window's end; to be called before its begin (time.monotonic())."""
        self._sleep(max(0.0, begin - self._clock()))
        before, started = self._read(), self._clock()
        samples: list[Sample] = []
        while (left := end - self._clock()) > 0:
            self._sleep(min(SAMPLE_S, left))
            if self._sample is not None:
                samples.append(self._sample())
        after, ended = self._read(), self._clock()
        if samples:
            util, mhz, watts = (sum(one) / len(samples) for one in zip(*samples, strict=True))
            self.gpu = Sample(round(util, 4), round(mhz), round(watts))
        if before is not None and after is not None:
            self._compare(before, after, ended - started)

    def _compare(self, before: Counters, after: Counters, seconds: float) -> None:
        done = {name: after[name] - before[name] for name in (*RUNS, "device_us")}
        self.busy_share = round(done["device_us"] * 1e-6 / seconds, 4)
        self.first_runs = first_runs(after) - first_runs(before)
        runs = sum(done[name] for name in RUNS)
        self.graph_share = round(done["graph_hits"] / runs, 4) if runs else 0.0

    def _read(self) -> Counters | None:
        """None where there are none, or where the engine is held up for longer than it is asked."""
        if self._counters is None:
            return None
        try:
            return dict(self._counters())
        except DeadlineExceeded:
            return None


def _nvml() -> Callable[[], Sample] | None:
    """Reads the first device, or None where there is no NVML."""
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return None

    def sample() -> Sample:
        return Sample(
            library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
            library.nvmlDeviceGetPowerUsage(handle) / 1000,
        )

    try:
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByIndex(0)
        sample()  # a part of a shared device does not tell all of it
    except library.NVMLError:
        return None
    return sample
