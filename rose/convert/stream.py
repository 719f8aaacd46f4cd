"""The weight stream: which tensors of a checkpoint become which of the model's, settled from headers alone, then read.

    plan = plan_weights(checkpoint, family, tied=True)
    for name, tensor in plan.stream(): ...

Loading fills a model from it, offline conversion writes files from it. At any time it holds the sources of one target.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rose.convert.checkpoint import Checkpoint
from rose.convert.rules import Drop, Family, Fuse, Rename, fill, match
from rose.errors import CheckpointError

_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True, slots=True)
class Step:
    """Sources one above the other, cut into as many equal parts as there are targets."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(slots=True)
class WeightPlan:
    """What is read, in the order of the files, and what is left out.

    Attributes:
        steps: each target stands in one step only.
        dropped: names in the checkpoint that a rule leaves out.
        prefix: what stands before every name of the backbone.
    """

    checkpoint: Checkpoint
    prefix: str = ""
    steps: list[Step] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """target -> shape, from the headers.

        Raises:
            CheckpointError: sources that do not fit on top of each other, or do not divide.
        """
        return {target: self._shape(step) for step in self.steps for target in step.targets}

    def stream(self, done: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """(target, tensor on the CPU in the checkpoint's dtype), every target once but for those that are done."""
        for step in self.steps:
            if step.targets[0] in done:
                continue
            tensors = [self.checkpoint.read(source) for source in step.sources]
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            yield from zip(step.targets, whole.chunk(len(step.targets)), strict=True)

    def origin(self, target: str) -> str:
        """Where a target comes from, in words, for errors."""
        for step in self.steps:
            if target in step.targets:
                files = sorted({str(self.checkpoint.entries[source].file) for source in step.sources})
                return f"{' + '.join(step.sources)} in {', '.join(files)}"
        return "nowhere"

    def _shape(self, step: Step) -> tuple[int, ...]:
        shapes = [self.checkpoint.entries[source].shape for source in step.sources]
        if len({shape[1:] for shape in shapes}) > 1 or any(not shape for shape in shapes[1:]):
            raise CheckpointError(f"{self.origin(step.targets[0])} do not fit together: their shapes are {shapes}")
        if len(shapes) == len(step.targets) == 1:
            return shapes[0]
        rows, left = divmod(sum(shape[0] for shape in shapes), len(step.targets))
        if left:
            raise CheckpointError(f"{self.origin(step.targets[0])} does not divide into {len(step.targets)} parts")
        return (rows, *shapes[0][1:])


# Before the targets of a head, which are another module's than the backbone's.
HEAD_PREFIX = "head."


def plan_weights(checkpoint: Checkpoint, family: Family, *, tied: bool, head: Sequence[Rename] = ()) -> WeightPlan:
    """Match every tensor of the checkpoint against the family's rules.

    Args:
        tied: tie_word_embeddings of the config: whether the head's matrix may stand for the embedding's.
        head: where a head's tensors are, with or without the prefix; they win over the family's drops. Their targets
            begin with HEAD_PREFIX.

    Raises:
        CheckpointError: no prefix or more than one fits, part of a fused group is missing, two tensors claim one
            target, or a tensor that is kept does not hold floating-point weights.
    """
    planner = _Planner(checkpoint, family, tied=tied, head=head)
    for name in checkpoint.entries:
        planner.take(name)
    return planner.finish()


class _Planner:
    """One pass over the names; `groups` holds the fused targets, and which of their parts were seen."""

    def __init__(self, checkpoint: Checkpoint, family: Family, *, tied: bool, head: Sequence[Rename]) -> None:
        self.checkpoint, self.family, self.tied, self.head = checkpoint, family, tied, head
        self.prefix = _find_prefix(checkpoint, family)
        self.result = WeightPlan(checkpoint, self.prefix)
        self.groups: dict[str, tuple[tuple[str, ...], set[str]]] = {}

    def take(self, name: str) -> None:
        bare = name.removeprefix(self.prefix)
        target = self._head_target(name, bare)
        if target is not None:
            self.result.steps.append(Step((name,), (HEAD_PREFIX + target,)))
        elif any(match(rule.source, full) is not None for rule in self.family.outside for full in (name, bare)):
            self._take_outside(name)
        elif not name.startswith(self.prefix):
            raise CheckpointError(f"{self._where(name)} is not served: the others' names begin with {self.prefix!r}")
        else:
            self._take_inside(name, bare)

    def finish(self) -> WeightPlan:
        for target, (sources, seen) in self.groups.items():
            missing = [source for source in sources if source not in seen]
            if missing:
                raise CheckpointError(f"{', '.join(missing)} is missing; {target} is made of it and {', '.join(seen)}")
        claimed: dict[str, Step] = {}
        for step in self.result.steps:
            for target in step.targets:
                if target in claimed:
                    both = " and ".join(self._where(source) for source in (claimed[target].sources[0], step.sources[0]))
                    raise CheckpointError(f"{target} is defined twice: by {both}")
                claimed[target] = step
            for source in step.sources:
                if self.checkpoint.entries[source].dtype not in _FLOATS:
                    dtype = self.checkpoint.entries[source].dtype
                    raise CheckpointError(f"{self._where(source)} holds {dtype}, which is not served as a weight")
        return self.result

    def _head_target(self, name: str, bare: str) -> str | None:
        for rule in self.head:
            for full in dict.fromkeys((name, bare)):
                gaps = match(rule.source, full)
                if gaps is not None:
                    return fill(rule.target, gaps)
        return None

    def _take_outside(self, name: str) -> None:
        """A head: dropped, unless it is the only copy of a matrix that the backbone shares with it."""
        head, own = self.family.tied or ("", "")
        if name.removeprefix(self.prefix) != head or self.prefix + own in self.checkpoint.entries:
            self.result.dropped.append(name)
        elif self.tied:
            self.result.steps.append(Step((name,), (own,)))
        else:
            raise CheckpointError(
                f"{self.prefix}{own} is missing, and {self._where(name)} cannot stand for it: "
                "tie_word_embeddings is false"
            )

    def _take_inside(self, name: str, bare: str) -> None:
        steps = self.result.steps
        for rule in self.family.rules:
            if isinstance(rule, Fuse):
                if self._take_part(rule, name, bare):
                    return
                continue
            gaps = match(rule.source, bare)
            if gaps is None:
                continue
            if isinstance(rule, Drop):
                self.result.dropped.append(name)
            elif isinstance(rule, Rename):
                steps.append(Step((name,), (fill(rule.target, gaps),)))
            else:
                steps.append(Step((name,), tuple(fill(target, gaps) for target in rule.targets)))
            return
        steps.append(Step((name,), (bare,)))

    def _take_part(self, rule: Fuse, name: str, bare: str) -> bool:
        """The step is queued when its last part turns up, so that files are read in order."""
        for template in rule.sources:
            gaps = match(template, bare)
            if gaps is None:
                continue
            target = fill(rule.target, gaps)
            sources = tuple(self.prefix + fill(source, gaps) for source in rule.sources)
            _, seen = self.groups.setdefault(target, (sources, set()))
            seen.add(name)
            if len(seen) == len(sources):
                self.result.steps.append(Step(sources, (target,)))
            return True
        return False

    def _where(self, name: str) -> str:
        return f"{name} in {self.checkpoint.entries[name].file}"


def _find_prefix(checkpoint: Checkpoint, family: Family) -> str:
    found = [prefix for prefix in family.prefixes if prefix + family.anchor in checkpoint.entries]
    if len(found) == 1:
        return found[0]
    files = ", ".join(sorted({str(entry.file) for entry in checkpoint.entries.values()}))
    if not found:
        raise CheckpointError(f"{family.anchor} is missing, under every known prefix, in {files}")
    raise CheckpointError(f"{family.anchor} is defined twice in {files}, under {' and '.join(map(repr, found))}")
