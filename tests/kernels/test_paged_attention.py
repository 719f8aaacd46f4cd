"""Attention over pages against torch's own in fp64 over the history the pages were filled from."""

from __future__ import annotations

import pytest
import torch

from rose.batch import HeadRotation
from rose.kernels import paged_decode as decode_module
from rose.kernels import paged_prefill as prefill_module
from rose.kernels.paged_attention import paged_decode_ref, paged_prefill_ref
from rose.kernels.paged_decode import DecodeTile, decode_tile, paged_decode_triton, scratch_bytes
from rose.kernels.paged_prefill import PrefillTile, paged_prefill_triton
from rose.kernels.qk_norm_rope import rope_table
from rose.kernels.store_kv import rotate_heads_ref
from tests.support.paged_cases import paged

LENGTHS = [1, 15, 16, 17, 129]


def arguments(case, bound, scale, **more):
    shared = (case.k_cache, case.v_cache, case.page_table, case.kv_lengths, case.slots)
    return (case.q, case.k, case.v, *shared, bound, scale), more


def check_decode(place, close, lengths, heads=(2, 1, 32), bound=None, window=None, factor=2, **options):
    scale = heads[2] ** -0.5
    for run in (paged_decode_triton, paged_decode_ref):
        case = paged(place, lengths, [1] * len(lengths), *heads, **options)
        args, more = arguments(case, bound or max(lengths), scale, window=window)
        before = case.k_cache.clone()
        out = run(*args, **more)
        assert out.is_contiguous()
        close(out, case.expected(scale, window), factor)
        flat = [x.view(-1, *x.shape[2:]) for x in (case.k_cache, case.v_cache, before)]
        rows = case.slots.long()
        assert torch.equal(flat[0][rows], case.k)
        assert torch.equal(flat[1][rows], case.v)
        flat[0][rows] = flat[2][rows]
        assert torch.equal(flat[0].nan_to_num(7.0), flat[2].nan_to_num(7.0)), "another row of the cache was written"


def test_decode_at_every_length(place, close):
    check_decode(place, close, LENGTHS)


@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 128), (2, 1, 256), (3, 3, 16), (20, 1, 32)])
def test_decode_heads(place, close, heads):
    check_decode(place, close, [17, 70], heads)


def test_decode_over_many_shares(place, close):
    """2049 tokens: shares of several blocks each; short sequences beside them leave most shares empty."""
    check_decode(place, close, [2049, 3, 130, 1], bound=4096, width=256)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_decode_splits(place, close, monkeypatch, splits):
    monkeypatch.setattr(decode_module, "decode_tile", lambda *_: DecodeTile(16, splits, 4, 2))
    check_decode(place, close, [1, 2, 16, 17, 18, 33, 100, 161])


@pytest.mark.parametrize("window", [0, 1, 16, 40])
def test_decode_window(place, close, monkeypatch, window):
    monkeypatch.setattr(decode_module, "decode_tile", lambda *_: DecodeTile(16, 3, 4, 2))
    check_decode(place, close, [1, 16, 40, 41, 42, 100], window=window)


@pytest.mark.parametrize("page", [1, 16, 32])
def test_decode_page_sizes(place, close, page):
    check_decode(place, close, [1, 33, 70], page=page)


def test_decode_gives_the_same_bits_in_any_company(place):
    """Within one graph key: alone among dummies of page 0, and among others."""
    case = paged(place, [70, 5, 100, 33], [1] * 4, 2, 1, 32)
    args, _ = arguments(case, 256, 0.2)
    among = paged_decode_triton(*args)
    table, lengths, slots = case.page_table.clone(), case.kv_lengths.clone(), case.slots.clone()
    table[1:], lengths[1:], slots[1:] = 0, 1, 0
    args = (case.q, case.k, case.v, case.k_cache, case.v_cache, table, lengths, slots, 256, 0.2)
    assert torch.equal(paged_decode_triton(*args)[0], among[0])


def test_decode_writes_where_it_is_told(place, close):
    case = paged(place, [40, 7], [1, 1], 4, 2, 32)
    args, _ = arguments(case, 64, 0.2)
    out = torch.full((2, 4, 32), torch.nan, dtype=place.dtype, device=place.device)
    tile = decode_tile(2, 2, 32, 64)
    need = scratch_bytes(2, 4, 32, tile.splits)
    scratch = torch.full((need + 64,), 0xFF, dtype=torch.uint8, device=place.device)
    assert paged_decode_triton(*args, out=out, scratch=scratch) is out
    close(out, case.expected(0.2), 2)
    assert (scratch[need:] == 0xFF).all()
    if need:
        with pytest.raises(ValueError, match="bytes of scratch"):
            paged_decode_triton(*args, scratch=scratch[: need - 4])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "turned"), [((4, 2, 64), 64), ((2, 1, 128), 32)])
def test_decode_turns_heads_on_the_way(place, close, heads, turned, norm):
    """Norm, partial rotary and attention in one pass: as the three after one another."""
    H, G, head_dim = heads
    lengths = [5, 1, 80]
    case = paged(place, lengths, [1] * 3, *heads)
    weights = [place.randn(head_dim) if norm else None for _ in range(2)]
    rotation = HeadRotation(
        place.tensor([n - 1 for n in lengths]),
        rope_table(128, turned, 1e4, place.device),
        *weights,
        1e-6,
    )
    ready = case.packed.clone()
    rotate_heads_ref(ready, rotation, H, G)
    q, k, v = ready.view(3, -1, head_dim).split([H, G, G], dim=1)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    expected = paged_decode_ref(
        q, k, v, k_cache, v_cache, case.page_table, case.kv_lengths, case.slots, 128, head_dim**-0.5
    )
    for run in (paged_decode_triton, paged_decode_ref):
        args, _ = arguments(case, 128, head_dim**-0.5)
        close(run(*args, rotation=rotation), expected, 4)
        rows = case.slots.long()
        close(case.k_cache.view(-1, G, head_dim)[rows], k_cache.view(-1, G, head_dim)[rows], 2)
        assert torch.equal(case.v_cache.view(-1, G, head_dim)[rows], v)


def check_prefill(place, close, kv_lengths, new, heads=(2, 1, 32), window=None, decodes=0, **options):
    scale = heads[2] ** -0.5
    case = paged(place, kv_lengths, new, *heads, **options)
    case.store_new()
    expected = case.expected(scale, window)[decodes:]
    for run in (paged_prefill_triton, paged_prefill_ref):
        out = run(
            case.q,
            case.k_cache,
            case.v_cache,
            case.page_table,
            case.kv_lengths,
            case.cu_seqlens,
            decodes,
            scale,
            window,
        )
        close(out[decodes:], expected, 2)


@pytest.mark.parametrize("kv_lengths", [[1], [15], [16], [17], [129], [1, 15, 16, 17, 129]])
def test_prefill_of_whole_prompts(place, close, kv_lengths):
    check_prefill(place, close, kv_lengths, kv_lengths)


def test_prefill_of_chunks_behind_what_is_cached(place, close):
    check_prefill(place, close, [40, 200, 17, 300], [8, 70, 16, 1])


@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 128), (2, 1, 256), (3, 3, 16)])
def test_prefill_heads(place, close, heads):
    check_prefill(place, close, [100, 20], [70, 20], heads)


def test_prefill_leaves_out_decoding_sequences(place, close, monkeypatch):
    """Their rows come first; with blocks of 16 queries some programs belong to them and find no sequence."""
    monkeypatch.setattr(prefill_module, "prefill_tile", lambda *_: PrefillTile(16, 16, 4, 2))
    check_prefill(place, close, [9] * 40 + [50, 33], [1] * 40 + [20, 33], decodes=40)


@pytest.mark.parametrize("run", [(paged_decode_triton, paged_prefill_triton), (paged_decode_ref, paged_prefill_ref)])
def test_dummies_behind_decoding_sequences_and_behind_chunks(place, close, monkeypatch, run):
    """As a graph's bucket adds them: of page 0, whose rows are finite, one token each and then some tokens; they are
    answered with finite numbers, which the next layer reads, and nobody else's page is written."""
    monkeypatch.setattr(prefill_module, "prefill_tile", lambda *_: PrefillTile(16, 16, 4, 2))
    decode, prefill = run
    # Dummies are sequences 2, 3 and 6.
    kv_lengths, new = [20, 9, 1, 1, 50, 33, 40], [1, 1, 1, 1, 20, 33, 40]
    case = paged(place, kv_lengths, new, 4, 2, 32)
    for cache in (case.k_cache, case.v_cache):
        cache[0] = 0.5
    rows = [list(range(start, start + n)) for start, n in zip(case.cu_seqlens.tolist(), new, strict=False)]
    dummies = rows[2] + rows[3] + rows[6]
    case.page_table[[2, 3, 6]] = 0
    case.slots[dummies] = 0
    chunks = [i for own in rows[4:] for i in own]
    flat = [cache.view(-1, 2, 32) for cache in (case.k_cache, case.v_cache)]
    for cache, new_rows in zip(flat, (case.k, case.v), strict=True):
        cache[case.slots[chunks].long()] = new_rows[chunks]
    before = [cache.clone() for cache in flat]
    out = torch.full((len(case.q), 4, 32), torch.nan, dtype=place.dtype, device=place.device)
    tables = case.page_table, case.kv_lengths
    decode(
        *(x[:4] for x in (case.q, case.k, case.v)),
        case.k_cache,
        case.v_cache,
        *tables,
        case.slots,
        64,
        0.2,
        out=out[:4],
    )
    prefill(case.q, case.k_cache, case.v_cache, *tables, case.cu_seqlens, 4, 0.2, out=out)
    real = [i for i in range(len(out)) if i not in dummies]
    close(out[real], case.expected(0.2)[real], 2)
    assert out.isfinite().all()
    stored = {0, *case.slots[:2].tolist()}
    for cache, old in zip(flat, before, strict=True):
        untouched = [row for row in range(len(cache)) if row not in stored]
        assert torch.equal(cache[untouched].nan_to_num(7.0), old[untouched].nan_to_num(7.0))


@pytest.mark.parametrize("window", [0, 5, 16, 100])
def test_prefill_window(place, close, monkeypatch, window):
    monkeypatch.setattr(prefill_module, "prefill_tile", lambda *_: PrefillTile(16, 16, 4, 2))
    check_prefill(place, close, [70, 40], [40, 40], window=window)


def test_prefill_of_a_long_prompt(place, close):
    check_prefill(place, close, [2049], [130])


def test_shapes_that_do_not_fit_are_refused(place):
    case = paged(place, [5], [1], 2, 1, 32)
    args, _ = arguments(case, 16, 0.2)
    with pytest.raises(ValueError, match="a cache is two tensors"):
        paged_decode_triton(*args[:3], case.k_cache, case.v_cache[:1], *args[5:])
    with pytest.raises(ValueError, match="power of two"):
        paged_decode_triton(*(x[..., :24] for x in args[:3]), case.k_cache, case.v_cache, *args[5:])


def test_shares_follow_the_key_alone():
    # Few keys: nothing to merge where the sequences alone make 64 programs.
    assert [decode_tile(n, 8, 128, 1024).splits for n in (1, 2, 4, 8, 16, 64)] == [8, 4, 2, 1, 1, 1]
    assert [decode_tile(n, 2, 256, 1024).splits for n in (1, 8, 32)] == [32, 4, 1]
    assert decode_tile(8, 8, 128, 4096).splits == 5
    assert decode_tile(1, 8, 128, 16384).splits == 33
    assert decode_tile(64, 8, 128, 1024).splits == 1
    assert decode_tile(64, 8, 128, 16384).splits == 8
    assert decode_tile(1, 8, 128, 1).splits == 1
