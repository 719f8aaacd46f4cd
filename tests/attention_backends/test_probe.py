"""Missing packages, old versions, other devices and shapes: reasons in words, and nothing imported before its time."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rose.attention_backends import AttentionSpec, available_backends, load_backend
from rose.attention_backends.base import try_backend
from rose.errors import StartupError

GPU_BACKENDS = ["triton_short", "flash_attention4", "flashinfer3", "flashinfer2"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, cpu_spec: AttentionSpec) -> AttentionSpec:
    """A spec on a device that calls itself an H200; packages as installed here (none of them)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return replace(cpu_spec, device=torch.device("cuda"), max_length=256)


def _pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    real = importlib.metadata.version
    known = {name.replace("_", "-"): found for name, found in versions.items()}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: known.get(name) or real(name))


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_no_gpu_is_a_reason(name: str, cpu_spec: AttentionSpec) -> None:
    with pytest.raises(StartupError, match=f"{name} does not serve this model: needs a CUDA device, this is cpu"):
        load_backend(name, replace(cpu_spec, max_length=256))


@pytest.mark.parametrize("name", [*GPU_BACKENDS, "triton_paged", "flashinfer_paged"])
@pytest.mark.parametrize("change", [{}, {"dtype": torch.float32}, {"head_dim": 24}, {"max_length": 8192}])
def test_no_gpu_comes_before_what_no_change_would_help(
    name: str, change: dict[str, object], cpu_spec: AttentionSpec
) -> None:
    paged = {"layout": "paged", "causal": True} if name.endswith("_paged") else {}
    spec = replace(cpu_spec, **paged, **change)  # type: ignore[arg-type]
    assert try_backend(name, spec) == "needs a CUDA device, this is cpu"


@pytest.mark.parametrize(
    ("name", "package"),
    [("flash_attention4", "flash-attn-4"), ("flashinfer3", "flashinfer-python"), ("flashinfer2", "flashinfer-python")],
)
def test_a_package_that_is_not_installed_is_a_reason(name: str, package: str, hopper: AttentionSpec) -> None:
    assert try_backend(name, hopper) == f"{package} is not installed (pip install rose-serving[gpu])"


@pytest.mark.parametrize("name", ["flashinfer2", "flashinfer3"])
def test_c124_a_flashinfer_that_leaves_padding_blocks_unmasked_is_refused(
    name: str, hopper: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report C124 (flashinfer#5176): before 0.7.2 a replayed graph without split-KV reads stale plan entries."""
    _pretend(monkeypatch, flashinfer_python="0.6.18.post1")
    assert try_backend(name, hopper) == (
        "flashinfer-python 0.6.18.post1 is too old: 0.7.2 or later masks the padding blocks of a replayed graph"
    )


def test_a_package_that_fails_to_import_is_a_reason(hopper: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, flashinfer_python="0.7.4", flash_attn_4="4.0.0b36")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "flashinfer cannot be imported" in str(try_backend("flashinfer3", hopper))
    assert "flash_attn.cute cannot be imported" in str(try_backend("flash_attention4", hopper))


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"dtype": torch.float32}, "flashinfer3", "serves bfloat16 and float16, not torch.float32"),
        ({"head_dim": 96}, "flashinfer2", "serves head dims 64, 128, 256, not 96"),
        ({"head_dim": 100}, "flash_attention4", "not 100"),
        ({"layout": "paged"}, "flash_attention4", "serves ragged batches only, not paged ones"),
        ({"num_kv_heads": 3}, "triton_short", "16 query heads cannot share 3 key/value heads evenly"),
        ({"window": 128}, "flashinfer3", "serves sliding windows in causal models only"),
        ({"window": 128}, "triton_short", "has no sliding window, asked for one of 128"),
        ({"max_length": 512}, "triton_short", "serves sequences of at most 256 tokens, asked for up to 512"),
        ({"max_length": None}, "triton_short", "asked for of any length"),
    ],
)
def test_a_shape_that_is_not_served_is_a_reason(
    change: dict[str, object], name: str, reason: str, hopper: AttentionSpec
) -> None:
    assert reason in str(try_backend(name, replace(hopper, **change)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "left_out"),
    [((8, 0), {"flashinfer3", "flash_attention4"}), ((10, 0), {"flashinfer3", "flash_attention4"}), ((7, 5), None)],
)
def test_other_devices_leave_out_what_was_made_for_hopper(
    capability: tuple[int, int], left_out: set[str] | None, hopper: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = available_backends(hopper)
    wanted = set(GPU_BACKENDS) if left_out is None else left_out
    assert {name for name, reason in found.items() if "needs compute capability" in str(reason)} == wanted


def test_asking_imports_no_gpu_package() -> None:
    code = (
        "import sys, torch; from rose.attention_backends import *; "
        "available_backends(AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, "
        "device=torch.device('cpu'), causal=False, scale=1.0)); "
        "assert not {'flashinfer', 'flash_attn', 'cutlass', 'quack'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
