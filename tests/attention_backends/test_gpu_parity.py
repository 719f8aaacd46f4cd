"""Every backend on the device against the float64 reference: shapes, lengths, totals, poison.

Tolerance: no row (one token of one head) is off by more than 2^-7 of its length in bf16, 2^-10 in fp16; rounding alone
leaves about a fifth of that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from rose.attention_backends import AttentionBackend, AttentionSpec, WarmsUp
from rose.attention_backends.auto import spec_for
from rose.attention_backends.base import try_backend
from rose.attention_backends.check import LENGTHS, StaticAttention, check_backend, check_backends
from rose.attention_backends.reference import TOLERANCE, poisoned_qkv, reference_attention, row_error
from rose.errors import InternalError, StartupError

pytestmark = pytest.mark.gpu

BACKENDS = ["triton_short", "flash_attention4", "flashinfer3", "flashinfer2", "torch_sdpa"]
# These mask every key and value row by its sequence; the others load whole tiles and weight the neighbours' rows zero,
# which keeps out anything but NaN and infinity.
MASKED_LOADS = ["triton_short", "flashinfer2"]
DEVICE = torch.device("cuda")


def make_spec(head_dim: int = 64, group: int = 1, *, heads: int = 16, causal: bool = False, **more) -> AttentionSpec:
    known = {"dtype": torch.bfloat16, "device": DEVICE, "scale": head_dim**-0.5}
    return AttentionSpec(
        num_heads=heads, num_kv_heads=heads // group, head_dim=head_dim, causal=causal, **(known | more)
    )


@cache
def make_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Loaded and warmed up; the test is skipped, with the reason, where it cannot be had."""
    spec = spec_for(name, spec)
    found = try_backend(name, spec)
    if isinstance(found, str):
        pytest.skip(f"{name}: {found}")
    if isinstance(found, WarmsUp):
        try:
            found.warm_up(1)
        except StartupError as error:
            if "JIT compilation is disabled" in error.message:
                pytest.skip(error.message)
            raise
    return found


def limited(name: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths `name` is ever given."""
    return tuple(n for n in lengths if n <= (spec_for(name, make_spec()).max_length or n))


def inputs(spec: AttentionSpec, tokens: int, seed: int = 0):
    return poisoned_qkv(
        tokens, spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=DEVICE, seed=seed
    )


@cache
def many_rows(tokens: int):
    """Made once: not to be written to."""
    return inputs(make_spec(64), tokens)


def assert_right(name: str, spec: AttentionSpec, lengths: tuple[int, ...], tokens: int | None = None, qkv=None):
    """Run plainly and compare; returns the output of all rows."""
    backend = make_backend(name, spec)
    qkv = inputs(spec, tokens or sum(lengths)) if qkv is None else qkv
    out = StaticAttention(backend, qkv, len(lengths), max(lengths), key=None).plain(lengths)
    expected = reference_attention(*qkv, lengths, causal=spec.causal, scale=spec.scale, window=spec.window)
    assert row_error(out, expected) <= TOLERANCE[spec.dtype]
    return out


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 4), (128, 2), (128, 8), (256, 4)])
@pytest.mark.parametrize("name", BACKENDS)
def test_c129_parity(name: str, head_dim: int, group: int, causal: bool) -> None:
    """Report C129 (flash-attention#2192): mixed lengths around every block size, all head dims, groups and masks."""
    lengths = limited(name, LENGTHS[:-1])
    spec = make_spec(head_dim, group, causal=causal)
    assert_right(name, spec, lengths)
    assert_right(name, spec, lengths[::-1])


@pytest.mark.parametrize("name", BACKENDS)
def test_fp16_and_an_odd_scale(name: str) -> None:
    assert_right(name, make_spec(64, dtype=torch.float16, scale=0.31), limited(name, (1, 100, 129, 300)))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", BACKENDS[1:])
def test_one_sequence_of_4096(name: str, causal: bool) -> None:
    assert_right(name, make_spec(64, causal=causal), (4096,))


@pytest.mark.parametrize("name", ["flash_attention4", "torch_sdpa"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_sliding_window(name: str, causal: bool) -> None:
    assert_right(name, make_spec(64, causal=causal, window=64), (1, 64, 65, 66, 130, 512))


@pytest.mark.parametrize("name", BACKENDS)
def test_strided_views_and_copies_give_the_same_bits(name: str) -> None:
    spec, lengths = make_spec(128, 2), limited(name, (37, 128, 1, 300, 64))
    qkv = inputs(spec, sum(lengths))
    assert not qkv[0].is_contiguous()
    views = assert_right(name, spec, lengths, qkv=qkv)
    copies = assert_right(name, spec, lengths, qkv=tuple(x.contiguous() for x in qkv))
    assert torch.equal(views, copies)
    assert views.is_contiguous()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("count", [1, 2, 255, 257, 300])
def test_one_token_sequences_answer_their_own_value(name: str, count: int) -> None:
    """257 and 300: above 256 sequences FlashAttention 4 looks its blocks up with another kernel."""
    spec = make_spec(64, 4)
    qkv = inputs(spec, count)
    out = assert_right(name, spec, (1,) * count, qkv=qkv)
    assert torch.equal(out, qkv[2].repeat_interleave(4, dim=1))


@pytest.mark.parametrize("name", BACKENDS)
def test_many_sequences_among_them_long_ones(name: str) -> None:
    assert_right(name, make_spec(64), limited(name, (1, 2, 3, 200) * 80 + (500, 1000)))


@pytest.mark.parametrize("tokens", [16383, 16384, 16385])
@pytest.mark.parametrize("name", BACKENDS)
def test_c120_totals_around_16384(name: str, tokens: int) -> None:
    """Report C120 (flashinfer#1419): illegal memory access from 16,384 tokens on."""
    spec, qkv = make_spec(64), many_rows(tokens)
    assert_right(name, spec, (128,) * 127 + (tokens - 127 * 128 - 1, 1), qkv=qkv)
    if name != "triton_short":
        assert_right(name, spec, (tokens,), qkv=qkv)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", BACKENDS)
def test_c121_a_single_key_counts_whatever_its_score(name: str) -> None:
    """Report C121 (flashinfer#4451): a row whose only score is below -5e4 answered zeros."""
    spec = make_spec(64)
    q, k, v = inputs(spec, 3)
    q.fill_(128.0)
    k.fill_(-128.0)
    assert_right(name, replace(spec, causal=True), (1, 2), qkv=(q, k, v))


@pytest.mark.parametrize("name", BACKENDS)
def test_c123_identical_sequences_give_identical_rows_among_other_kernels(name: str) -> None:
    """Report C123 (flashinfer#725, #1046): the second short sequence zero; results spoiled by kernels before."""
    spec = make_spec(128, 2)
    q, k, v = inputs(spec, 4 * 50)
    for x in (q, k, v):
        x[50:] = x[:50].repeat(3, 1, 1)
    backend = make_backend(name, spec)
    attention = StaticAttention(backend, (q, k, v), 4, 64, key=None)
    noise = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    first = attention.plain((50,) * 4)
    for turn in range(20):
        noise = (noise @ noise).tanh()
        poison = torch.full((1 << 20,), torch.nan, device=DEVICE)
        out = attention.plain((50,) * 4, slot=turn % 2)
        del poison
        assert torch.equal(out, first)
    for start in (50, 100, 150):
        assert torch.equal(first[start : start + 50], first[:50])
    assert_right(name, spec, (50,) * 4, qkv=(q, k, v))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [24, 64, 256])
def test_c15_c16_rows_past_the_last_sequence_change_nothing(name: str, rows: int) -> None:
    """Report C15 (sglang#15757), Report C16 (flash-attention#1228): one sequence of 21, rows rounded up.

    NaN where loads are masked by row; else large finite values, which is what ROSE's dummy rows are by construction.
    """
    spec = make_spec(64)
    qkv = inputs(spec, rows)
    for x in qkv:
        x[21:] = torch.nan if name in MASKED_LOADS else 3e4
    out = assert_right(name, spec, (21,), qkv=qkv)
    alone = assert_right(name, spec, (21,), qkv=tuple(x[:21] for x in qkv))
    assert row_error(out, alone[:21].double()) <= TOLERANCE[spec.dtype]


@pytest.mark.parametrize("name", MASKED_LOADS)
def test_a_neighbour_of_nan_stays_outside(name: str) -> None:
    spec = make_spec(64)
    qkv = inputs(spec, 21 + 50 + 70)
    for x in qkv:
        x[21:71] = torch.nan
    backend = make_backend(name, spec)
    out = StaticAttention(backend, qkv, 3, 128, key=None).plain((21, 50, 70))
    assert bool(out[:21].isfinite().all())
    assert bool(out[71:].isfinite().all())


@pytest.mark.parametrize("name", BACKENDS[:-1])
def test_c128_empty_sequences_are_refused_before_the_kernel(name: str) -> None:
    """Report C128 (flash-attention#2568, #2562): head dim 256 with an empty sequence hangs."""
    spec = make_spec(64)
    with pytest.raises(InternalError, match="empty sequence: number 1 of 3"):
        StaticAttention(make_backend(name, spec), inputs(spec, 7), 3, 64, key=None).plain((3, 0, 4))


def test_the_self_check_passes_for_all_that_is_installed() -> None:
    found = check_backends(make_spec(128, 2))
    wrong = {name: reason for name, reason in found.items() if reason and ("wrong" in reason or "failed" in reason)}
    assert wrong == {}
    assert found["torch_sdpa"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_c129_the_full_grid(name: str) -> None:
    """Report C129 (flash-attention#2192): all head dims, groups and masks, 4096 tokens too, plainly and replayed."""
    spec = make_spec(64)
    make_backend(name, spec)
    reason = check_backend(name, spec, full=True)
    if reason is not None and "JIT compilation is disabled" in reason:
        pytest.skip(reason)
    assert reason is None
