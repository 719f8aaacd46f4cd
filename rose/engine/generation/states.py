"""Pools of recurrent state on the device: a row a running sequence, for layers that keep one instead of a cache.

Row 0 belongs to dummies; rows past those of running sequences hold states to be found again. A row is not cleared
between sequences: layers start from nothing where a sequence starts (see rose.batch.PagedContext.kv_lengths). Knows
shapes; knows neither layers nor requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.errors import InternalError
from rose.models.base import RecurrentSpec


class StatePools:
    """A rose.batch.RecurrentStates of `rows` rows.

    Attributes:
        nbytes: device memory they take.
    """

    def __init__(self, spec: RecurrentSpec, rows: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """
        Args:
            dtype: of the convolution's inputs; the states themselves are fp32.
        """
        conv = (rows, spec.conv_channels, spec.conv_width - 1)
        state = (rows, spec.value_heads, spec.key_dim, spec.value_dim)
        # All layers in one tensor, so that a row of them all is copied at once.
        self._all = (
            torch.zeros(len(spec.layers), *conv, dtype=dtype, device=device),
            torch.zeros(len(spec.layers), *state, dtype=torch.float32, device=device),
        )
        self._conv, self._states = (dict(zip(spec.layers, pool.unbind(), strict=True)) for pool in self._all)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._all)

    @staticmethod
    def row_bytes(spec: RecurrentSpec, dtype: torch.dtype) -> int:
        """Bytes one row takes over all layers."""
        conv = spec.conv_channels * (spec.conv_width - 1) * dtype.itemsize
        return len(spec.layers) * (conv + spec.value_heads * spec.key_dim * spec.value_dim * 4)

    def conv(self, layer: int) -> Tensor:
        """[rows, channels, kernel - 1] of a model layer."""
        return self._of(self._conv, layer)

    def recurrent(self, layer: int) -> Tensor:
        """[rows, value heads, key dim, value dim] fp32 of a model layer."""
        return self._of(self._states, layer)

    def copy(self, source: int, target: int) -> None:
        """A row of all layers onto another; queued on a device, not waited for."""
        for pool in self._all:
            pool[:, target].copy_(pool[:, source])

    def _of(self, pool: dict[int, Tensor], layer: int) -> Tensor:
        try:
            return pool[layer]
        except KeyError:
            raise InternalError(f"layer {layer} keeps no recurrent state; layers {tuple(pool)} do") from None
