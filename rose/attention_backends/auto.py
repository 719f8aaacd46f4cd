"""Every usable backend behind the surface of one: each batch goes to the one the table names for its graph key.

Knows names and reasons; knows no kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from rose.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    KeepsPlans,
    WarmsUp,
    WorkspaceReport,
    backend_names,
    try_backend,
)
from rose.attention_backends.choose import LONGEST, Choice, Load, choose
from rose.batch import AttentionPlan, Batch
from rose.config.profile import Point
from rose.errors import InternalError, StartupError

_REMEMBERED = 4096


def spec_for(name: str, spec: AttentionSpec) -> AttentionSpec:
    """`spec` as backend `name` is asked for it: some are only given the shorter sequences."""
    longest = LONGEST.get(name)
    if longest is None:
        return spec
    return replace(spec, max_length=longest if spec.max_length is None else min(longest, spec.max_length))


class AutoBackend:
    """The backends that serve `spec`, chosen among for each batch.

    Attributes:
        backends: by name, those in use.
        left_out: by name, why the others are not.
        measured: points of a profile that come before the table; none: the table alone.
    """

    name = "auto"

    def __init__(
        self, spec: AttentionSpec, left_out: Mapping[str, str] | None = None, measured: Sequence[Point] = ()
    ) -> None:
        """
        Args:
            left_out: backends not to be used, with the reason (from `check_backends`, or from a profile).
            measured: times of this shape on this device.

        Raises:
            StartupError: none is left.
        """
        self._spec = spec
        self._chosen: dict[Load, AttentionBackend] = {}
        self.backends: dict[str, AttentionBackend] = {}
        self.left_out: dict[str, str] = dict(left_out or {})
        self.measured = tuple(measured)
        for name in {name for point in self.measured for name in point.us} - set(backend_names()):
            self.left_out[name] = "there is no such backend in this version"
        for name in backend_names():
            if name in self.left_out:
                continue
            found = try_backend(name, spec_for(name, spec))
            if isinstance(found, str):
                self.left_out[name] = found
            else:
                self.backends[name] = found
        if not self.backends:
            raise StartupError(f"no attention backend serves this model: {_listed(self.left_out)}")

    def supports(self, spec: AttentionSpec) -> str | None:
        return None if spec == self._spec else "was built for another model"

    def explain(self, load: Load) -> Choice:
        """The backend of a load and why.

        Raises:
            InternalError: none of those in use serves it.
        """
        choice = choose(self._spec.head_dim, load, self.left_out, self.measured)
        if choice is None or choice.backend not in self.backends:
            raise InternalError(
                f"no attention backend for {load.tokens} tokens in {load.sequences} sequences of up to "
                f"{load.max_length}: {_listed(self.left_out)}"
            )
        return choice

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        load = Load(batch.num_tokens, batch.num_sequences, batch.max_length)
        backend = self._chosen.get(load)
        if backend is None:
            if len(self._chosen) >= _REMEMBERED:  # plain batches come in any size
                self._chosen.clear()
            backend = self._chosen[load] = self.backends[self.explain(load).backend]
        return backend.plan(batch, slot)

    def warm_up(self, max_sequences: int) -> None:
        for backend in self.backends.values():
            if isinstance(backend, WarmsUp):
                backend.warm_up(max_sequences)

    def release(self, key: Hashable) -> None:
        for backend in self.backends.values():
            if isinstance(backend, KeepsPlans):
                backend.release(key)

    def workspace(self) -> WorkspaceReport:
        reports = [b.workspace() for b in self.backends.values() if isinstance(b, KeepsPlans)]
        return WorkspaceReport(
            device_bytes=sum(r.device_bytes for r in reports),
            used_bytes=sum(r.used_bytes for r in reports),
            limit_bytes=sum(r.limit_bytes for r in reports),
            pinned_bytes=sum(r.pinned_bytes for r in reports),
            keys=sum(r.keys for r in reports),
            fence_waits=sum(r.fence_waits for r in reports),
        )


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
