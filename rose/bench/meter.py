"""When a window may begin, and how busy a device was in it: by the engine's counters, and by NVML where it is there.

The engine's share counts from a batch's first to its last event, gaps between its kernels included; NVML's counts the
samples in which any kernel ran. Knows counters; knows neither loads nor carriers.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from rose.bench.steady import await_steady, first_runs

SAMPLE_S = 0.1
Counters = Mapping[str, int]


class Meter:
    """Reads counters until a window may begin and at both ends of it, and samples in between; one window a meter.

    Attributes:
        settled_s: under load until the window might begin.
        first_runs: batches of the window that were the first, or the first captured, of their shape; None without
            counters.
        busy_share: device seconds of the engine's batches over the clock's, or None without counters.
        graph_share: batches replayed from a graph, of all; 0 without counters.
        gpu_util: 0 .. 1, or None without NVML.
    """

    def __init__(self, counters: Callable[[], Counters] | None, *, nvml: bool = True) -> None:
        """
        Args:
            counters: the engine's own; None for a server that tells none.
        """
        self._counters = counters
        self._sample = _nvml() if nvml else None
        self.settled_s: float | None = None
        self.first_runs: int | None = None
        self.busy_share: float | None = None
        self.graph_share = 0.0
        self.gpu_util: float | None = None

    def settle(self, quiet_s: float, limit_s: float) -> None:
        """Wait, under load, for what `await_steady` waits for.

        Raises:
            NotSteadyError: it did not come.
        """
        self.settled_s = round(await_steady(self._counters, quiet_s, limit_s), 2)

    def watch(self, begin: float, end: float) -> None:
        """Wait for the window's end; to be called before its begin (time.monotonic())."""
        time.sleep(max(0.0, begin - time.monotonic()))
        before, started = self._read(), time.monotonic()
        samples: list[float] = []
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(SAMPLE_S, left))
            if self._sample is not None:
                samples.append(self._sample())
        after, ended = self._read(), time.monotonic()
        if samples:
            self.gpu_util = round(sum(samples) / len(samples), 4)
        if "device_us" in after:
            self.busy_share = round((after["device_us"] - before["device_us"]) * 1e-6 / (ended - started), 4)
        if after:
            self.first_runs = first_runs(after) - first_runs(before)
        hits = after.get("graph_hits", 0) - before.get("graph_hits", 0)
        names = ("graph_hits", "graph_plain", "graph_captures")
        runs = sum(after.get(name, 0) - before.get(name, 0) for name in names)
        self.graph_share = round(hits / runs, 4) if runs else 0.0

    def _read(self) -> Counters:
        return dict(self._counters()) if self._counters is not None else {}


def _nvml() -> Callable[[], float] | None:
    """Reads the first device's utilisation, or None where there is no NVML."""
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByIndex(0)
    except library.NVMLError:
        return None
    return lambda: float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
