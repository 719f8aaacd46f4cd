"""The pages that hold the keys and values of generating sequences: one block of device memory a layer.

Knows layers, pages and dtypes; whose page it is, the engine knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rose.errors import InternalError


class KVCache:
    """Keys and values of every layer that keeps some.

    Row `page * page_size + offset` of a layer holds one token. All values start as zeros, so that whatever reads a row
    nobody wrote finds a finite one.

    Attributes:
        layers: model layers that have a part, in order.
        nbytes: device memory it takes.
    """

    def __init__(
        self,
        kv_layers: Sequence[int],
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            num_pages: page 0, which belongs to nobody, included.
        """
        self.layers = tuple(kv_layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (2, num_pages, page_size, num_kv_heads, head_dim)
        self._blocks = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in self.layers]
        # By model layer index: layers that keep nothing have no pair. Asked for by every layer of every plain run.
        self._pairs: list[tuple[Tensor, Tensor] | None] = [None] * (max(self.layers, default=-1) + 1)
        for index, block in zip(self.layers, self._blocks, strict=True):
            self._pairs[index] = (block[0], block[1])

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k, v) of a model layer, each [num_pages, page_size, G, head_dim].

        Raises:
            InternalError: that layer keeps none.
        """
        pair = self._pairs[index] if 0 <= index < len(self._pairs) else None
        if pair is None:
            raise InternalError(f"layer {index} keeps no keys and values; layers {self.layers} do")
        return pair

    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes one page takes over all `num_layers` layers that keep some."""
        return num_layers * 2 * page_size * num_kv_heads * head_dim * dtype.itemsize
