"""Memory of attention plans: one arena of device bytes, and page-locked staging with a fence.

Device memory belongs to a graph key, because a captured graph reads it; host memory belongs to a slot (0 or 1), because
it is read only until its copy has run. Knows bytes and events; knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rose.errors import InternalError

_ALIGNMENT = 256
_SLAB_BYTES = 4 << 20


class WorkspaceFull(InternalError):
    """No room for the plan of one more graph key. Run the batch without a key, or release another key first."""


class Arena:
    """Device bytes, cut from slabs, capped and counted. Blocks given back serve later requests of about their size.

    All users must work on one stream: a block given back may still be read by kernels queued there.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.device_bytes = 0
        self.used_bytes = 0
        self._slabs: list[Tensor] = []
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._free: dict[int, list[Tensor]] = {}
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> Tensor:
        """At least `nbytes` bytes, uint8, 256-byte aligned, contents undefined.

        Raises:
            WorkspaceFull: the limit is reached.
        """
        size = _size_class(nbytes)
        free = self._free.get(size)
        block = free.pop() if free else self._cut(size)
        self._taken[block.data_ptr()] = block.numel()
        self.used_bytes += block.numel()
        return block

    def give_back(self, block: Tensor) -> None:
        size = self._taken.pop(block.data_ptr())
        self.used_bytes -= size
        self._free.setdefault(size, []).append(block)

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite everything, in use or not (0xFF bytes are NaN in every float format): for checks only."""
        for slab in self._slabs:
            slab.fill_(byte)

    def _cut(self, size: int) -> Tensor:
        if self._rest.numel() < size:
            slab_bytes = max(size, min(_SLAB_BYTES, self.limit_bytes - self.device_bytes))
            if self.device_bytes + slab_bytes > self.limit_bytes:
                return self._larger(size)
            try:
                slab = torch.empty(slab_bytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError as error:
                raise WorkspaceFull(f"the device has no {slab_bytes} bytes left for attention plans") from error
            self._keep_rest()
            self._rest = slab
            self._slabs.append(self._rest)
            self.device_bytes += slab_bytes
        block, self._rest = self._rest[:size], self._rest[size:]
        return block

    def _larger(self, size: int) -> Tensor:
        fitting = [free_size for free_size, blocks in self._free.items() if free_size > size and blocks]
        if not fitting:
            raise WorkspaceFull(
                f"attention plans may take {self.limit_bytes} bytes of device memory; {self.used_bytes} are in use "
                f"and {size} more are needed"
            )
        return self._free[min(fitting)].pop()

    def _keep_rest(self) -> None:
        # What is left of the last slab is cut into the largest classes that fit, so that no byte is lost.
        while self._rest.numel() >= _ALIGNMENT:
            size = _class_within(self._rest.numel())
            self._free.setdefault(size, []).append(self._rest[:size])
            self._rest = self._rest[size:]


def _size_class(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of an eighth of its power of two: few classes, at most an eighth wasted."""
    step = max(_ALIGNMENT, (1 << max(nbytes - 1, 1).bit_length()) >> 4)
    return -(-max(nbytes, 1) // step) * step


def _class_within(nbytes: int) -> int:
    """The largest size class of at most `nbytes`."""
    step = max(_ALIGNMENT, (1 << nbytes.bit_length()) >> 4)
    return nbytes // step * step


class Fence(Protocol):
    """What Staging needs of torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Staging:
    """One slot's page-locked host buffer: written by the CPU, then read by queued copies.

    `acquire` → write → queue copies → `release`. The next `acquire` returns only when those copies have run, so the
    boundaries of one step can never be overwritten by the next before the device has them. With two slots in turn and
    at most two batches in flight it never has to wait; if it must, it waits and counts.
    """

    def __init__(self, device: torch.device, nbytes: int, new_fence: Callable[[], Fence] | None = None) -> None:
        self._on_cuda = device.type == "cuda"
        if new_fence is None and self._on_cuda:
            new_fence = torch.cuda.Event
        self._fence = new_fence() if new_fence is not None else None
        self._queued = False
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_cuda)
        self.waits = 0

    def acquire(self) -> Tensor:
        """The buffer, free to be written."""
        if self._queued and self._fence is not None and not self._fence.query():
            self.waits += 1
            self._fence.synchronize()
        self._queued = False
        return self.host

    def release(self) -> None:
        """All copies from the buffer are queued on the current stream."""
        if self._fence is not None:
            self._fence.record()
        self._queued = True
