"""Each batch goes to the backend the table names; those left out keep their reasons."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch

from rose.attention_backends import (
    AttentionSpec,
    KeepsPlans,
    WarmsUp,
    WorkspaceReport,
    auto,
    backend_names,
    load_backend,
)
from rose.attention_backends.auto import AutoBackend
from rose.attention_backends.choose import Load
from rose.batch import Batch
from rose.errors import InternalError, StartupError


class Recorder:
    """A backend that only remembers."""

    def __init__(self, name: str, spec: AttentionSpec) -> None:
        self.name, self.spec = name, spec
        self.planned: list[tuple[int, int]] = []
        self.warmed: list[int] = []

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, batch: Batch, slot: int = 0):
        self.planned.append((batch.num_tokens, slot))
        return self

    def warm_up(self, max_sequences: int) -> None:
        self.warmed.append(max_sequences)


class Keeper(Recorder):
    def __init__(self, name: str, spec: AttentionSpec) -> None:
        super().__init__(name, spec)
        self.released: list[Hashable] = []

    def release(self, key: Hashable) -> None:
        self.released.append(key)

    def workspace(self) -> WorkspaceReport:
        return WorkspaceReport(device_bytes=10, used_bytes=5, limit_bytes=20, pinned_bytes=3, keys=1, fence_waits=2)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, cpu_spec: AttentionSpec) -> AutoBackend:
    def make(name: str, spec: AttentionSpec) -> Recorder | str:
        if name == "torch_sdpa":
            return "not in this test"
        return (Keeper if name.startswith("flashinfer") else Recorder)(name, spec)

    monkeypatch.setattr(auto, "try_backend", make)
    return AutoBackend(cpu_spec)


def _batch(tokens: int, sequences: int, bound: int) -> Batch:
    ids = torch.zeros(tokens, dtype=torch.int32)
    return Batch(ids, ids, ids, (tokens - sequences + 1,) + (1,) * (sequences - 1), bound)


def test_each_load_goes_where_the_table_says(backend: AutoBackend) -> None:
    loads = {"triton_short": (128, 1, 128), "flash_attention4": (512, 1, 512), "flashinfer3": (8192, 16, 8192)}
    for slot in (0, 1):
        for name, load in loads.items():
            assert backend.plan(_batch(*load), slot) is backend.backends[name]
    assert backend.backends["flashinfer3"].planned == [(8192, 0), (8192, 1)]
    assert backend.backends["flashinfer2"].planned == []
    assert "3.0 µs" in backend.explain(Load(128, 1, 128)).reason


def test_any_number_of_plain_sizes_is_remembered_within_bounds(backend: AutoBackend) -> None:
    for tokens in range(300, 300 + 5000):
        backend.explain(Load(tokens, 1, tokens))
        backend.plan(Batch(*[torch.zeros(1, dtype=torch.int32)] * 3, (1,), tokens))
    assert len(backend._chosen) <= 4096


def test_the_short_one_is_asked_for_short_sequences_only(backend: AutoBackend) -> None:
    assert backend.backends["triton_short"].spec.max_length == 256
    assert backend.backends["flash_attention4"].spec.max_length is None


def test_what_the_check_found_wrong_is_not_used(monkeypatch, cpu_spec: AttentionSpec) -> None:
    monkeypatch.setattr(auto, "try_backend", Recorder)
    backend = AutoBackend(cpu_spec, left_out={"triton_short": "wrong on this machine"})
    choice = backend.explain(Load(128, 1, 128))
    assert choice.backend == "flash_attention4"
    assert "triton_short would come before it but is left out: wrong on this machine" in choice.reason


def test_life_of_keys_reaches_all(backend: AutoBackend) -> None:
    assert isinstance(backend, KeepsPlans)
    assert isinstance(backend, WarmsUp)
    backend.warm_up(7)
    backend.release("key")
    assert all(b.warmed == [7] for b in backend.backends.values())
    assert backend.backends["flashinfer2"].released == backend.backends["flashinfer3"].released == ["key"]
    assert backend.workspace() == WorkspaceReport(
        device_bytes=20, used_bytes=10, limit_bytes=40, pinned_bytes=6, keys=2, fence_waits=4
    )


def test_nothing_usable_is_an_error_with_all_reasons(monkeypatch, cpu_spec: AttentionSpec) -> None:
    monkeypatch.setattr(auto, "try_backend", lambda name, spec: f"no {name}")
    with pytest.raises(StartupError, match=r"flashinfer3: no flashinfer3.*torch_sdpa: no torch_sdpa"):
        AutoBackend(cpu_spec)


def test_a_load_nobody_left_can_serve_is_an_error(monkeypatch, cpu_spec: AttentionSpec) -> None:
    monkeypatch.setattr(auto, "try_backend", lambda name, s: Recorder(name, s) if name == "triton_short" else "gone")
    backend = AutoBackend(cpu_spec)
    assert backend.explain(Load(128, 1, 128)).backend == "triton_short"
    with pytest.raises(InternalError, match="no attention backend for 512 tokens in 1 sequences of up to 512"):
        backend.plan(_batch(512, 1, 512))


def test_on_the_cpu_it_is_torch(cpu_spec: AttentionSpec) -> None:
    backend = load_backend("auto", replace(cpu_spec, dtype=torch.float32))
    assert isinstance(backend, AutoBackend)
    assert list(backend.backends) == ["torch_sdpa"]
    assert set(backend.left_out) == set(backend_names()) - {"torch_sdpa"}
    assert backend.explain(Load(128, 1, 128)).backend == "torch_sdpa"
    with pytest.raises(StartupError, match="there are auto, triton_short"):
        load_backend("nonsense", cpu_spec)
