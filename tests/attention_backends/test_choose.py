"""The table: which backend for which load, with reasons, and what happens when one is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.attention_backends import backend_names
from rose.attention_backends.choose import FALL_BACK, RULES, Load, choose, rank

loads = st.builds(
    Load, tokens=st.integers(1, 1 << 17), sequences=st.integers(1, 1024), max_length=st.integers(1, 1 << 15)
)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("load", "backend"),
    [
        (Load(128, 1, 128), "triton_short"),
        (Load(256, 2, 256), "triton_short"),
        (Load(512, 1, 512), "flash_attention4"),
        (Load(576, 2, 576), "flash_attention4"),
        (Load(4096, 1, 4096), "flash_attention4"),
        (Load(16384, 1, 16384), "flash_attention4"),
        (Load(2560, 6, 2560), "flash_attention4"),
        (Load(16384, 4, 16384), "flash_attention4"),
        (Load(8192, 16, 8192), "flashinfer3"),
        (Load(12800, 25, 12800), "flashinfer3"),
        (Load(51200, 100, 51200), "flashinfer3"),
    ],
)
def test_the_published_loads(head_dim: int, load: Load, backend: str) -> None:
    choice = choose(head_dim, load, {})
    assert choice is not None
    assert choice.backend == backend
    assert choice.reason in [rule.reason for rule in RULES if rule.backend == backend]


@pytest.mark.parametrize(
    ("head_dim", "backend"),
    [(32, "triton_short"), (64, "triton_short"), (128, "flash_attention4"), (256, "flash_attention4")],
)
@pytest.mark.parametrize("load", [Load(512, 4, 128), Load(4096, 16, 256), Load(12800, 100, 128), Load(16384, 256, 64)])
def test_many_short_sequences(head_dim: int, load: Load, backend: str) -> None:
    choice = choose(head_dim, load, {})
    assert choice is not None
    assert choice.backend == backend
    without = choose(head_dim, load, dict.fromkeys(("flash_attention4", "flashinfer3", "flashinfer2"), "gone"))
    assert without is not None
    assert without.backend == "triton_short"  # before torch's, which is launched kernel by kernel


def test_an_unmeasured_head_dim_is_served_by_the_one_without_a_plan() -> None:
    choice = choose(256, Load(51200, 100, 51200), {})
    assert choice is not None
    assert choice.backend == "flash_attention4"


def test_the_next_one_serves_and_says_why_the_first_does_not() -> None:
    left_out = {"flashinfer3": "flashinfer-python is not installed", "triton_short": "no"}
    choice = choose(64, Load(8192, 16, 8192), left_out)
    assert choice is not None
    assert choice.backend == "flash_attention4"
    assert choice.reason == (
        "next in the fall-back order; flashinfer3 would come before it but is left out: "
        "flashinfer-python is not installed"
    )
    assert choose(64, Load(8192, 16, 8192), dict.fromkeys(FALL_BACK, "gone")) is None


@given(st.sampled_from([32, 64, 96, 128, 256]), loads, st.sets(st.sampled_from(FALL_BACK[:-1])))
def test_every_load_has_a_backend_that_may_serve_it(head_dim: int, load: Load, missing: set[str]) -> None:
    choice = choose(head_dim, load, dict.fromkeys(missing, "missing"))
    assert choice is not None
    assert choice.backend not in missing
    assert choice.backend != "triton_short" or load.max_length <= 256
    ranked = [c.backend for c in rank(head_dim, load)]
    assert len(set(ranked)) == len(ranked)
    assert set(ranked) == set(backend_names()) - ({"triton_short"} if load.max_length > 256 else set())
