"""The tensors of a folder for one pass over all of them: files are mapped anew every so often.

A mapped file's pages count as the process's memory for as long as it is open, so that a 100 GB checkpoint read to its
end would look like 100 GB. Knows files; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from rose.convert.checkpoint import Checkpoint, Entry

_REOPEN = 256 << 20  # bytes: well below the 1 GB that a conversion may need besides its largest tensors
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
LETTERS = {dtype: letters for letters, dtype in DTYPES.items()}
# What a calibrated weight is written in, beside those.
CODES = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}


class Weights(Protocol):
    """Tensors by name; `parts` gives runs of one's rows, in order, each of which stays valid until the next."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def parts(self, name: str) -> Iterator[Tensor]: ...

    def read_row(self, name: str, index: int) -> Tensor: ...

    def finish(self) -> None: ...


class FolderWeights:
    """A folder's own tensors. Use as a context; raises what `Checkpoint` raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoint = Checkpoint(folder)
        self._mapped = 0

    @property
    def summaries(self) -> tuple[tuple[str, str], ...]:
        """(adapter, what it is) of what is merged."""
        return ()

    @property
    def checkpoint(self) -> Checkpoint:
        """For planning from headers."""
        return self._checkpoint

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._checkpoint.entries

    def parts(self, name: str) -> Iterator[Tensor]:
        """The tensor as it is converted, in runs of rows."""
        yield self.read(name)

    def read(self, name: str) -> Tensor:
        """The folder's own tensor, valid until the next is read."""
        if self._mapped > _REOPEN:
            self._checkpoint.close()
            self._checkpoint = Checkpoint(self.folder)
            self._mapped = 0
        tensor = self._checkpoint.read(name)
        self._mapped += tensor.nbytes
        return tensor

    def read_row(self, name: str, index: int) -> Tensor:
        return self._checkpoint.read_row(name, index)

    def finish(self) -> None:
        """Called when all was read; raises where it was not what it promised to be."""

    def __enter__(self) -> FolderWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._checkpoint.close()
