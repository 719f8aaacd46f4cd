"""`rose doctor`: what this machine offers, and why what is missing is missing.

Knows packages, devices and backends; knows neither models nor serving.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

import rose
from rose.cli.shared import Commands, add_command

if TYPE_CHECKING:
    import torch

# What each part of ROSE stands on, by the extra that installs it.
_PACKAGES: dict[str, tuple[str, ...]] = {
    "core": ("torch", "numpy", "safetensors", "tokenizers", "protobuf", "huggingface-hub"),
    "gateway": ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "grpcio", "prometheus-client"),
    "gpu": ("triton", "flashinfer-python", "flash-attn-4", "nvidia-cutlass-dsl", "fla-core"),
}

# Query heads, key/value heads, head dim, layout, whose.
_SHAPES: tuple[tuple[int, int, int, Literal["ragged", "paged"], str], ...] = (
    (16, 16, 64, "ragged", "BGE-M3"),
    (16, 8, 128, "ragged", "Qwen3-0.6B, pplx-embed 0.6b"),
    (16, 8, 128, "paged", "Qwen3-0.6B generating"),
)


def add_doctor(commands: Commands) -> None:
    add_command(commands, "doctor", _doctor, "report versions, devices and attention backends", ("rose doctor",))


def _doctor(options: argparse.Namespace) -> int:
    for line in report():
        print(line, flush=True)
    return 0


def report() -> Iterator[str]:
    """The report, a line at a time; imports torch only when it gets to it."""
    yield f"rose      {rose.__version__}"
    yield f"python    {platform.python_version()} at {sys.executable}"
    yield f"machine   {platform.platform()}, {platform.machine()}, {os.cpu_count()} logical CPUs"
    for extra, packages in _PACKAGES.items():
        yield f"{extra:<9} " + ", ".join(f"{name} {_version(name)}" for name in packages)
    yield from _torch_lines()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _torch_lines() -> Iterator[str]:
    try:
        import torch
    except ImportError as error:
        yield f"torch     cannot be imported: {error}"
        return
    threads = os.environ.get("OMP_NUM_THREADS")
    source = f"OMP_NUM_THREADS={threads}" if threads else "torch's default; OMP_NUM_THREADS is not set"
    yield f"threads   {torch.get_num_threads()} ({source})"
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield f"device    cuda:{index} {_cuda_facts(index)}"
        devices.append(torch.device("cuda:0"))
    else:
        yield "device    cpu only: torch sees no CUDA device" + ("" if torch.version.cuda else " (a CPU build)")
    for device in devices:
        yield from _backend_lines(device)


def _cuda_facts(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    memory_gib = properties.total_memory / 2**30
    return (
        f"{properties.name}, {memory_gib:.0f} GiB, sm_{properties.major}{properties.minor}, CUDA {torch.version.cuda}"
    )


def _backend_lines(device: torch.device) -> Iterator[str]:
    """Which attention backends agree with the fp64 reference on `device`: for the two shapes of embedders most served,
    and for one that generates."""
    import torch

    from rose.attention_backends.base import AttentionSpec
    from rose.attention_backends.check import check_backends

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for heads, kv_heads, head_dim, layout, who in _SHAPES:
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            causal=layout == "paged",
            scale=head_dim**-0.5,
            layout=layout,
        )
        yield (
            f"attention on {device}, checked against fp64: {heads} heads over {kv_heads} of {head_dim}, "
            f"{str(dtype).removeprefix('torch.')}, {'causal' if spec.causal else 'bidirectional'}, {layout} ({who})"
        )
        for name, reason in check_backends(spec).items():
            yield f"  {name:<17} " + ("ok" if reason is None else f"no: {reason}")
