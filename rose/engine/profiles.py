"""What profiles are looked up by: this machine and its packages, the shape of attention, the shape of a whole model.

Knows where versions are read; knows neither files nor measurements.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import rose
from rose.attention_backends.base import AttentionSpec
from rose.config import ArchitectureConfig
from rose.config.profile import AttentionShape, Machine, ModelShape, Products
from rose.kernels import tiles

# How the name of a CPU ends.
_CPUS = " logical CPUs"
# What a kernel's time depends on.
PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4", "nvidia-cutlass-dsl")

# A variant must beat the one in force by so much in a chain of its own, since between its neighbours in a model the
# best by itself is not always the best.
CLEARLY_FASTER = 0.03
_VARIANTS: tuple[tiles.Variant, ...] = ("library", "epilogue", "heuristic")


def this_machine(device: torch.device) -> Machine:
    """The device as profiles name it, its driver, and the packages that are installed."""
    packages = {"rose": rose.__version__, "torch": torch.__version__}
    if device.type != "cuda":
        return Machine(device=f"{_cpu_name()}, {os.cpu_count()}{_CPUS}", packages=packages)
    packages |= {name: found for name in PACKAGES[1:] if (found := _version(name))}
    return Machine(device=torch.cuda.get_device_name(device), driver=_driver(), packages=packages)


def same_kind(one: Machine, other: Machine) -> bool:
    """Whether the same backends can serve on both: the same GPU, or any two CPUs."""
    return one.device == other.device or (one.device.endswith(_CPUS) and other.device.endswith(_CPUS))


def attention_shape(spec: AttentionSpec) -> AttentionShape:
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=str(spec.dtype).removeprefix("torch."),
        causal=spec.causal,
        window=spec.window,
        layout=spec.layout,
    )


def model_shape(architecture: ArchitectureConfig, attention: AttentionShape) -> ModelShape:
    return ModelShape(
        hidden_size=architecture.hidden_size,
        num_layers=architecture.num_layers,
        intermediate_size=architecture.intermediate_size,
        attention=attention,
    )


def preferred(products: Products) -> dict[str, dict[str, tiles.Variant]]:
    """Variants of products to prefer: where one is clearly faster than what the table, tuned within models, has; and
    the fastest where the table's own was wrong or failed, and so has no time."""
    found: dict[str, dict[str, tiles.Variant]] = {}
    for name, buckets in products.items():
        for bucket, us in buckets.items():
            known = [variant for variant in _VARIANTS if variant in us]
            best = min(known, key=lambda variant: us[variant], default=None)
            if best is not None and us[best] * (1 + CLEARLY_FASTER) < us.get("table", float("inf")):
                found.setdefault(name, {})[bucket] = best
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """Of the kernel module; empty where it does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
