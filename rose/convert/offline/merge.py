"""Adapters merged into a base while it is read: in fp32, one after the other, cast once at the end.

Of a merged tensor only a run of rows is held at a time. Knows names and which change belongs to which tensor; the
arithmetic is in `delta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rose.convert.offline.adapter import Adapter, Change
from rose.convert.offline.delta import Delta, row_blocks
from rose.convert.offline.weights import DTYPES, FolderWeights
from rose.convert.rules import Drop, Family, match
from rose.errors import CheckpointError


class MergedWeights(FolderWeights):
    """A base's tensors with adapters merged into them.

    Args:
        adapters: in the order in which they were trained.
        dtype: of the result; None keeps each tensor's.
        tied: one matrix is both embedding and head.
        reads_head: the head's rows are read (a language model, or a reranker made of one).

    Raises:
        CheckpointError: a tensor of an adapter that the base has no place for, or of another shape.
    """

    def __init__(
        self,
        folder: Path,
        adapters: Sequence[Adapter],
        family: Family,
        *,
        dtype: torch.dtype | None,
        tied: bool,
        reads_head: bool,
    ) -> None:
        super().__init__(folder)
        self._adapters = adapters
        self._dtype = dtype
        self._changed: set[Path] = set()
        self._differs = False
        # tensor's name -> (adapter, change) in the order of the adapters.
        self._changes: dict[str, list[tuple[Adapter, Change]]] = {}
        for adapter in adapters:
            self._place(adapter, family, tied=tied, reads_head=reads_head)

    @property
    def summaries(self) -> tuple[tuple[str, str], ...]:
        return tuple((str(adapter.path), adapter.summary) for adapter in self._adapters)

    def parts(self, name: str) -> Iterator[Tensor]:
        stored = self.read(name)
        if name not in self._changes:
            yield stored
            return
        deltas = self._deltas(name, stored)
        for at in row_blocks(stored):
            yield self._merged(stored, deltas, at)

    def _deltas(self, name: str, stored: Tensor) -> list[tuple[Path, Delta]]:
        """(adapter, what it does) in the adapters' order."""
        deltas = [(adapter.path, Delta(change, name.rpartition(".")[2])) for adapter, change in self._changes[name]]
        for number, (_, delta) in enumerate(deltas):
            delta.settle(stored, [earlier for _, earlier in deltas[:number]])
        return deltas

    def _merged(self, stored: Tensor, deltas: Sequence[tuple[Path, Delta]], at: slice) -> Tensor:
        """The rows of `at`."""
        rows = stored[at].to(torch.float32, copy=True)
        for path, delta in deltas:
            self._apply(path, delta, rows, at)
        merged = rows.to(self._dtype or stored.dtype)
        self._differs = self._differs or not torch.equal(merged, stored[at].to(merged.dtype))
        return merged

    def _apply(self, path: Path, delta: Delta, rows: Tensor, at: slice) -> None:
        """Rows are compared only until an adapter was seen to change some."""
        before = None if path in self._changed else rows.clone()
        delta.apply(rows, at)
        if before is not None and not torch.equal(before, rows):
            self._changed.add(path)

    def read_row(self, name: str, index: int) -> Tensor:
        if name not in self._changes:
            return super().read_row(name, index)
        stored = self.read(name)
        at = next(at for at in row_blocks(stored) if at.start <= index < at.stop)  # as `parts` cuts: equal to the bit
        return self._merged(stored, self._deltas(name, stored), at)[index - at.start]

    def finish(self) -> None:
        """
        Raises:
            CheckpointError: an adapter that changed nothing of what was read, or a change that the dtype swallowed.
        """
        for adapter in self._adapters:
            if adapter.path not in self._changed:
                raise CheckpointError(f"{adapter.path} changes nothing of what this model keeps: the merge is the base")
        if not self._differs:
            raise CheckpointError("the adapters' changes are lost in the dtype of the result; use --dtype float32")

    def _place(self, adapter: Adapter, family: Family, *, tied: bool, reads_head: bool) -> None:
        prefixes = [prefix for prefix in family.prefixes if prefix + family.anchor in self.entries]
        head, own = (f"{name}".removesuffix(".weight") for name in family.tied) if family.tied else ("", "")
        unmatched: list[str] = []
        for module, change in adapter.changes.items():
            bare = _bare(module, family)
            if tied and reads_head and bare in (head, own):
                raise CheckpointError(f"{adapter.path} changes {module}, one of two tied matrices; untie them first")
            place = next((p + bare for p in (*prefixes, "") if f"{p}{bare}.weight" in self.entries), None)
            if place is None and ((tied and bare == head) or _dropped(bare, family)):
                continue  # a tied model's head, or BERT's pooler: no embedder has them
            if place is None:
                unmatched.append(module)
                continue
            self._check(adapter, module, change, place)
            for kind in ("weight", "bias"):
                if _touches(change, kind):
                    self._changes.setdefault(f"{place}.{kind}", []).append((adapter, change))
        if unmatched:
            named = ", ".join(unmatched[:5]) + (f" and {len(unmatched) - 5} more" if len(unmatched) > 5 else "")
            raise CheckpointError(f"{adapter.path} has tensors for {named}, which {self.folder} does not have")

    def _check(self, adapter: Adapter, module: str, change: Change, place: str) -> None:
        for kind in ("weight", "bias"):
            if not _touches(change, kind):
                continue
            name = f"{place}.{kind}"
            if name not in self.entries:
                raise CheckpointError(f"{adapter.path} changes {name}, and the base has none")
            if self.entries[name].dtype not in DTYPES:
                raise CheckpointError(f"{name} holds {self.entries[name].dtype}, into which nothing can be merged")
            for shape in _shapes(change, kind):
                if shape != self.entries[name].shape:
                    raise CheckpointError(
                        f"{adapter.path} changes {module} with {kind} of shape {shape}, and the base has "
                        f"{self.entries[name].shape}: it belongs to another model"
                    )


def _bare(module: str, family: Family) -> str:
    """Without whatever stood before it in the model that was trained, which need not be what the base's file has."""
    before = max((prefix for prefix in family.prefixes if module.startswith(prefix)), key=len)
    return module.removeprefix(before)


def _dropped(bare: str, family: Family) -> bool:
    return any(isinstance(rule, Drop) and match(rule.source, f"{bare}.weight") is not None for rule in family.rules)


def _touches(change: Change, kind: str) -> bool:
    delta = change.a if kind == "weight" else change.bias
    return delta is not None or kind in change.replaced


def _shapes(change: Change, kind: str) -> Iterator[tuple[int, ...]]:
    if kind in change.replaced:
        yield tuple(change.replaced[kind].shape)
    if kind == "bias" and change.bias is not None:
        yield tuple(change.bias.shape)
    if kind == "weight" and change.a is not None and change.b is not None:
        outer = (change.b.shape[0], change.a.shape[1])
        yield outer[::-1] if change.embedding else outer
        if change.magnitude is not None and change.magnitude.numel() != change.b.shape[0]:
            yield (change.magnitude.numel(),)
