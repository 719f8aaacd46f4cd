"""The surface every attention backend offers, and the table of backends.

Knows names and reasons; imports a backend only when it is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from rose.attention_backends.kv_cache import KVCache
from rose.batch import AttentionPlan, Batch
from rose.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What one model asks of attention; the same for all its layers.

    Attributes:
        scale: factor on q @ k before the softmax, usually head_dim ** -0.5.
        window: tokens seen to either side (left only if causal), or None for all.
        layout: "ragged" (no cache, keys are this batch's own) or "paged".
        max_length: longest sequence this backend will be asked for, or None for any.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    scale: float
    window: int | None = None
    layout: Literal["ragged", "paged"] = "ragged"
    max_length: int | None = None


class AttentionBackend(Protocol):
    """One way to compute attention on one device."""

    name: str

    def supports(self, spec: AttentionSpec) -> str | None:
        """None if it can serve `spec`, else the reason why not, in words."""
        ...

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        """Prepare for `batch`. Never waits for the device.

        Args:
            batch: its device buffers must stay in place until the plan's last run.
            slot: which of the staging buffers to use (0 or 1); two batches in flight use different ones.
        """
        ...


@runtime_checkable
class Paged(Protocol):
    """A backend of layout "paged": it stores the batch's keys and values in pages and attends over them."""

    def bind(self, cache: KVCache) -> None:
        """Where keys and values are kept; called once, before the first plan."""
        ...


def plans_on_host(backend: AttentionBackend) -> bool:
    """Whether it needs `PagedContext.host_kv_lengths`; it says so with an attribute of this name."""
    return bool(getattr(backend, "plans_on_host", False))


@runtime_checkable
class WarmsUp(Protocol):
    """A backend that compiles or loads something on its first use; call this before serving and before any capture."""

    def warm_up(self, max_sequences: int) -> None:
        """Run every kernel once that batches of up to `max_sequences` sequences can reach, and wait for it.

        Raises:
            StartupError: it cannot be compiled, loaded or run, with the reason.
        """
        ...


@runtime_checkable
class KeepsPlans(Protocol):
    """A backend that holds device memory for each graph key (`Batch.key`) it has planned."""

    def release(self, key: Hashable) -> None:
        """The graph of `key` is gone: its memory may serve other keys. A key never planned is no error."""
        ...

    def workspace(self) -> WorkspaceReport:
        """What is held now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceReport:
    """Memory of plans.

    Attributes:
        device_bytes: taken from the device.
        used_bytes: of these, in use by some key or slot.
        limit_bytes: device_bytes never grows beyond it.
        pinned_bytes: page-locked host memory for staging.
        keys: graph keys with a plan.
        fence_waits: plans that had to wait because their slot's last copy was still queued; 0 where the engine keeps
            its slots apart.
    """

    device_bytes: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    pinned_bytes: int = 0
    keys: int = 0
    fence_waits: int = 0


def workspace_of(backend: AttentionBackend) -> WorkspaceReport:
    """What `backend` holds for its plans now; nothing, where it keeps none."""
    return backend.workspace() if isinstance(backend, KeepsPlans) else WorkspaceReport()


def can_capture(plan: AttentionPlan) -> bool:
    """Whether a graph may capture this plan's runs and replay them after each later plan of the same key.

    A plan says so with an attribute `capturable`; one that does not is run plainly.
    """
    return bool(getattr(plan, "capturable", False))


def is_fixed(plan: AttentionPlan) -> bool:
    """Whether all plans of a key are the same, so that a replay needs no new one: lengths are read on the device.

    A plan says so with an attribute `fixed`; one that does not is made anew before each replay.
    """
    return bool(getattr(plan, "fixed", False))


def captures_prompts(backend: AttentionBackend) -> bool:
    """Whether plans of this paged backend may be captured where there are chunks of prompts, too: of one key they have
    the same sequences, decoding ones and tokens, and nothing else.

    A backend says so with an attribute `captures_prompts`.
    """
    return bool(getattr(backend, "captures_prompts", False))


# name -> (module, class). Order is preference where nothing was measured.
_BACKENDS: dict[str, tuple[str, str]] = {
    "triton_short": ("rose.attention_backends.triton_short", "TritonShort"),
    "flash_attention4": ("rose.attention_backends.flash_attention4", "FlashAttention4"),
    "flashinfer3": ("rose.attention_backends.flashinfer3", "FlashInfer3"),
    "flashinfer2": ("rose.attention_backends.flashinfer2", "FlashInfer2"),
    "torch_sdpa": ("rose.attention_backends.torch_sdpa", "TorchSdpa"),
}

# The same for those that keep a cache in pages (AttentionSpec.layout "paged"), in order of preference.
_PAGED: dict[str, tuple[str, str]] = {
    "triton_paged": ("rose.attention_backends.triton_paged", "TritonPaged"),
    "flashinfer_paged": ("rose.attention_backends.flashinfer_paged", "FlashInferPaged"),
    "torch_paged": ("rose.attention_backends.torch_paged", "TorchPaged"),
}

_AUTO = ("auto", ("rose.attention_backends.auto", "AutoBackend"))


def backend_names() -> tuple[str, ...]:
    """All backends of ragged batches, installed or not, in order of preference where nothing was measured."""
    return tuple(_BACKENDS)


def paged_backend_names() -> tuple[str, ...]:
    """The same of paged batches."""
    return tuple(_PAGED)


def load_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Import and construct one backend for `spec`.

    "auto" is all that serve it, chosen among by load; for a paged spec the first that does, in order of preference.

    Raises:
        StartupError: unknown name, a package that is not installed, or a spec it does not support, with the reason.
    """
    found = try_backend(name, spec)
    if isinstance(found, str):
        raise StartupError(f"attention backend {name} does not serve this model: {found}")
    return found


def try_backend(name: str, spec: AttentionSpec) -> AttentionBackend | str:
    """As `load_backend`, with the bare reason in place of an error where it cannot serve.

    Raises:
        StartupError: unknown name; or "auto" where no backend serves.
    """
    known = _BACKENDS | _PAGED
    if name not in known and name != _AUTO[0]:
        raise StartupError(f"unknown attention backend {name!r}; there are auto, {', '.join(known)}")
    if name == _AUTO[0] and spec.layout == "paged":
        return _first_paged(spec)
    module_name, class_name = _AUTO[1] if name == _AUTO[0] else known[name]
    try:
        backend: AttentionBackend = getattr(importlib.import_module(module_name), class_name)(spec)
    except ImportError as error:
        return f"it cannot be loaded: {error}"
    return backend.supports(spec) or backend


def _first_paged(spec: AttentionSpec) -> AttentionBackend | str:
    reasons = []
    for name in _PAGED:
        found = try_backend(name, spec)
        if not isinstance(found, str):
            return found
        reasons.append(f"{name}: {found}")
    return "; ".join(reasons)


def available_backends(spec: AttentionSpec) -> dict[str, AttentionBackend | str]:
    """Every backend of the spec's layout by name, or the reason it is left out."""
    return {name: try_backend(name, spec) for name in (_PAGED if spec.layout == "paged" else _BACKENDS)}
