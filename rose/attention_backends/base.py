"""The surface every attention backend offers, and the table of backends.

Knows names and reasons; imports a backend only when it is loaded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

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


# name -> (module, class). Order is preference where nothing was measured.
_BACKENDS: dict[str, tuple[str, str]] = {
    "triton_short": ("rose.attention_backends.triton_short", "TritonShort"),
    "flash_attention4": ("rose.attention_backends.flash_attention4", "FlashAttention4"),
    "flashinfer3": ("rose.attention_backends.flashinfer3", "FlashInfer3"),
    "flashinfer2": ("rose.attention_backends.flashinfer2", "FlashInfer2"),
    "torch_sdpa": ("rose.attention_backends.torch_sdpa", "TorchSdpa"),
}


def load_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Import and construct one backend for `spec`.

    Raises:
        StartupError: unknown name, a package that is not installed, or a spec it does not support, with the reason.
    """
    if name not in _BACKENDS:
        raise StartupError(f"unknown attention backend {name!r}; there are {', '.join(_BACKENDS)}")
    module_name, class_name = _BACKENDS[name]
    try:
        backend: AttentionBackend = getattr(importlib.import_module(module_name), class_name)(spec)
    except ImportError as error:
        raise StartupError(f"attention backend {name} cannot be loaded: {error}") from error
    reason = backend.supports(spec)
    if reason is not None:
        raise StartupError(f"attention backend {name} does not serve this model: {reason}")
    return backend


def available_backends(spec: AttentionSpec) -> dict[str, AttentionBackend | str]:
    """Every backend by name, or the reason it is left out."""
    found: dict[str, AttentionBackend | str] = {}
    for name in _BACKENDS:
        try:
            found[name] = load_backend(name, spec)
        except StartupError as error:
            found[name] = error.message
    return found
