"""Whether a backend can serve, in words: the package, the device and the shape.

What the spec itself answers comes first: whose batches, then the kind of device, then dtype and heads. On a CPU a dtype
would be the wrong thing to blame, since no other one helps there. What the machine must be asked comes after that.

Knows version numbers and device capabilities; imports no backend.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection

import torch

from rose.attention_backends.base import AttentionSpec

# Importing these packages can fail in many ways (a missing part, a version check, a driver query); all mean "left out".
IMPORT_ERRORS = (ImportError, RuntimeError, OSError, AttributeError, TypeError, ValueError)


def package_reason(distribution: str, minimum: tuple[int, ...], why: str) -> str | None:
    """None if `distribution` is installed and at least `minimum`, else the reason with `why` that version is needed."""
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed (pip install rose-serving[gpu])"
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[: len(minimum)])
    if numbers < minimum:
        return f"{distribution} {found} is too old: {'.'.join(map(str, minimum))} or later {why}"
    return None


def device_reason(spec: AttentionSpec, least: tuple[int, int], below: tuple[int, int] | None = None) -> str | None:
    """None if the device is CUDA with compute capability in [least, below), else the reason."""
    if spec.device.type != "cuda":
        return _kind_reason(spec)
    if not torch.cuda.is_available():
        return "needs a CUDA device, torch sees none"
    capability = torch.cuda.get_device_capability(spec.device)
    if capability < least or (below is not None and capability >= below):
        limit = f"{least[0]}.{least[1]}" + ("" if below is None else f" up to below {below[0]}.{below[1]}")
        return f"needs compute capability {limit}, this device has {capability[0]}.{capability[1]}"
    return None


def shape_reason(
    spec: AttentionSpec, head_dims: Collection[int], dtypes: Collection[torch.dtype] = (torch.bfloat16, torch.float16)
) -> str | None:
    """None if layout, kind of device (CUDA), dtype, heads and head dim are among those served, else the reason."""
    if spec.layout != "ragged":
        return f"serves ragged batches only, not {spec.layout} ones"
    return _heads_reason(spec, head_dims, dtypes)


def paged_reason(
    spec: AttentionSpec, head_dims: Collection[int], dtypes: Collection[torch.dtype] = (torch.bfloat16, torch.float16)
) -> str | None:
    """The same for a backend of paged caches, which are causal all."""
    if spec.layout != "paged":
        return f"attends over pages, not over {spec.layout} batches"
    if not spec.causal:
        return "attends causally only: what is cached cannot have seen what came later"
    return _heads_reason(spec, head_dims, dtypes)


def _heads_reason(spec: AttentionSpec, head_dims: Collection[int], dtypes: Collection[torch.dtype]) -> str | None:
    if spec.device.type != "cuda":
        return _kind_reason(spec)
    if spec.dtype not in dtypes:
        return f"serves {' and '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {spec.dtype}"
    if spec.head_dim not in head_dims:
        return f"serves head dims {', '.join(map(str, sorted(head_dims)))}, not {spec.head_dim}"
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} key/value heads evenly"
    return None


def _kind_reason(spec: AttentionSpec) -> str:
    return f"needs a CUDA device, this is {spec.device.type}"
