"""The tensors of a checkpoint folder by name, whatever files hold them.

Headers are read at once, data one tensor at a time. Order of preference: model.safetensors, its shards with an index,
then the same two as pytorch_model.bin (read with `weights_only`, so that no code in a pickle runs). Knows files; knows
neither architectures nor rules.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rose.config.json_file import JsonFile
from rose.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """What a header says of one tensor. `dtype` is safetensors' name ("F32", "BF16", "F8_E4M3", ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class _File(Protocol):
    entries: dict[str, Entry]

    def read(self, name: str) -> Tensor: ...

    def read_row(self, name: str, index: int) -> Tensor: ...

    def close(self) -> None: ...


class _Safetensors:
    """One .safetensors file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        opener: Any = safe_open  # its stubs are incomplete
        try:
            self._handle = opener(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self.entries: dict[str, Entry] = {}
        for name in list(self._handle.keys()):
            header = self._handle.get_slice(name)
            self.entries[name] = Entry(path, header.get_dtype(), tuple(header.get_shape()))

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor

    def read_row(self, name: str, index: int) -> Tensor:
        rows: Tensor = self._handle.get_slice(name)[index : index + 1]
        return rows[0]

    def close(self) -> None:
        self._handle.__exit__(None, None, None)


_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


class _TorchFile:
    """One .bin file of torch.save; mapped where its format allows."""

    def __init__(self, path: Path) -> None:
        self._tensors = _unpickle(path)
        self.entries = {
            name: Entry(path, _DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_row(self, name: str, index: int) -> Tensor:
        return self._tensors[name][index]

    def close(self) -> None:
        self._tensors = {}


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6, when files were not archives that can be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} holds no plain table of tensors")
    return state


class Checkpoint:
    """All tensors of a folder.

    Attributes:
        entries: name -> header, in the order of the files.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: or one file of weights.

        Raises:
            CheckpointError: no weights, a missing or damaged file, or an index that its files contradict.
        """
        self.entries: dict[str, Entry] = {}
        self._files: dict[Path, _File] = {}
        paths, index = ([folder], None) if folder.is_file() else _weight_files(folder)
        for path in paths:
            file = _Safetensors(path) if path.suffix == ".safetensors" else _TorchFile(path)
            self._files[path] = file
            for name, entry in file.entries.items():
                if name in self.entries:
                    raise CheckpointError(f"{name} is defined twice: in {self.entries[name].file} and in {path}")
                self.entries[name] = entry
        if index is not None:
            self._check_index(*index)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU; it may be a view of the mapped file, so copy before closing."""
        return self._files[self.entries[name].file].read(name)

    def read_row(self, name: str, index: int) -> Tensor:
        """One row of a matrix, without reading the rest."""
        return self._files[self.entries[name].file].read_row(name, index)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_index(self, path: Path, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.entries or self.entries[name].file.name != file:
                raise CheckpointError(f"{path} says that {name} is in {file}, and it is not")
        for name, entry in self.entries.items():
            if name not in weight_map:
                raise CheckpointError(f"{entry.file} holds {name}, which {path.name} does not list")


def _weight_files(folder: Path) -> tuple[list[Path], tuple[Path, dict[str, str]] | None]:
    """(files in order, (index file, tensor -> file name) where there is an index)."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).exists():
            return [folder / stem], None
        index_path = folder / f"{stem}.index.json"
        if index_path.exists():
            weight_map = _read_index(index_path)
            paths = [folder / name for name in sorted(set(weight_map.values()))]
            missing = [path.name for path in paths if not path.exists()]
            if missing:
                raise CheckpointError(f"{index_path} names {', '.join(missing)}, which {_is_are(missing)} missing")
            return paths, (index_path, weight_map)
    raise CheckpointError(
        f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, whole or in shards"
    )


def _read_index(path: Path) -> dict[str, str]:
    table = JsonFile.read(path).child("weight_map")
    weight_map = {name: table.text(name) for name in table.data}
    for file in weight_map.values():
        if Path(file).name != file:
            raise table.error(f"{file!r} is not a plain file name")
    if not weight_map:
        raise table.error("weight_map is missing or empty")
    return weight_map


def _is_are(things: list[str]) -> str:
    return "is" if len(things) == 1 else "are"
