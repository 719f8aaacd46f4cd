"""Which tile a product gets: a committed table of measured choices, and a rule for shapes that are not in it.

Knows shapes; measures nothing while serving. A choice depends on the shape of the weight and on the bucket of the token
count only, so that split-K counts, and with them the last bits of a sum, are the same for all batches of one graph key.
`benchmarks/kernels/tune_gemm.py` writes the table; `prefer` lets what a profile of this device measured come before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

# "logits": the head over the vocabulary, which writes fp32.
Op = Literal["linear", "partial", "gated", "logits"]
# "plain": rose/kernels/gemm.py; "prefetch": the same, asking the L2 cache for all weights of a program before it waits
# for the kernel before it; "sm90": rose/kernels/gemm_sm90.py, which takes them into shared memory by then. Of e4m3
# codes "plain" is rose/kernels/scaled_gemm.py and "sm90" scaled_gemm_sm90.py.
Kind = Literal["plain", "prefetch", "sm90"]
# How a product may be served: as the table has it, by the rule for shapes that are not in it, by the library, or by
# rose/kernels/gemm_epilogue.py where there is no activation that would take it there anyway.
Variant = Literal["table", "heuristic", "library", "epilogue"]

BUCKETS = (16, 32, 64, 128, 192, 256, 512, 1024)
LARGE = "large"
_TABLE = Path(__file__).with_name("tiles.json")
# Most tokens of a step of generating; a bucket.
_FEW = 64
# The rule's tiles are for so many tokens at most; a bucket. At 256 they take 7.8 µs for a 3072 x 1024 product and the
# library 5.8; where the sum is left in pieces the two are even (H200).
_RULED = 128
# Weights, 16 MiB of them, that cost a step or a short prompt more than anything else does.
_HEAVY = 8 << 20
# Inputs of a step of the Hopper kernel for e4m3: 256 bytes of a row, as 128 inputs of bf16 are.
_CODES = 256
# Shared memory one program may take, in bytes: 227 KiB, less what the compiler keeps for itself.
_MAX_SHARED = 226 * 1024
# Streaming multiprocessors of an H100 or H200: what one wave of programs should fill.
_SMS = 132


@dataclass(frozen=True, slots=True)
class Tile:
    """How one product is cut up.

    Attributes:
        bm, bn, bk: tokens, output features and input features of a tile.
        split: pieces the input features are split into.
        warps, stages: warps a program, depth of the pipeline.
        kind: which kernel.
        ahead: sm90 only, tiles of weights that a program holds at a time, asked for before the wait; 0: all it needs.
        late_launch: sm90 only, let the next kernel start after the wait instead of at the top.
    """

    bm: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    kind: Kind = "plain"
    ahead: int = 0
    late_launch: bool = False


def bucket(tokens: int) -> str:
    """The name of the smallest bucket that holds `tokens`; above the largest of them "large"."""
    return next((str(b) for b in BUCKETS if tokens <= b), LARGE)


@cache
def _table() -> dict[str, dict[str, Tile | None]]:
    """ "op:NxK", of e4m3 codes "fp8-op:NxK" -> bucket -> tile; None where the library or an epilogue is faster."""
    return {
        name: {bucket: Tile(**row) if isinstance(row, dict) else None for bucket, row in rows.items()}
        for name, rows in json.loads(_TABLE.read_text()).items()
    }


@cache
def epilogues() -> frozenset[tuple[str, str]]:
    """(key, bucket) of products that the table gives to gemm_epilogue.py although no activation takes them there."""
    rows = (
        (name, bucket, row) for name, rows in json.loads(_TABLE.read_text()).items() for bucket, row in rows.items()
    )
    return frozenset((name, bucket) for name, bucket, row in rows if row == "epilogue")


def key(op: Op, n: int, k: int, *, codes: bool = False) -> str:
    """Of a row of the table; `codes`: both sides are e4m3."""
    return f"{'fp8-' if codes else ''}{op}:{n}x{k}"


def _row(name: str, tokens: int) -> tuple[Tile | None] | None:
    """The row of a product for so many tokens, its own or that of 64 for fewer; None where the table is silent."""
    rows, own = _table().get(name, {}), bucket(tokens)
    if own in rows:
        return (rows[own],)
    return (rows[str(_FEW)],) if tokens <= _FEW and str(_FEW) in rows else None


_preferred: dict[str, dict[str, Variant]] = {}


def prefer(measured: Mapping[str, Mapping[str, Variant]]) -> None:
    """Let measured variants come before the table: "op:NxK" -> bucket -> variant. Replaces what was preferred before.

    As the table, it holds for the process and its kind of device: to be called before anything is captured.
    """
    _preferred.clear()
    _preferred.update({name: dict(rows) for name, rows in measured.items()})
    choose.cache_clear()


@contextmanager
def preferring(name: str, bucket: str, variant: Variant) -> Iterator[None]:
    """One preference beside those there are, until the context ends: for whoever compares variants."""
    before = {key: dict(rows) for key, rows in _preferred.items()}
    prefer({**before, name: {**before.get(name, {}), bucket: variant}})
    try:
        yield
    finally:
        prefer(before)


@cache
def choose(op: Op, n: int, k: int, tokens: int) -> Tile | None:
    """The tile for a [tokens, k] x [n, k] product (`n`: outputs, of one half where gated); None: the library serves it.

    The library (cuBLAS) serves what the table leaves to it. Where the table is silent it serves heads, more than 128
    tokens, and weights of 16 MiB from 17 tokens on. Fewer than 64 tokens take what was measured for 64: the Hopper
    kernel's tiles have 64 rows at least, and rows past the tokens cost no bytes.
    """
    name = bucket(tokens)
    preferred = _preferred.get(key(op, n, k), {}).get(name, "table")
    if preferred in ("library", "epilogue"):
        return None
    if preferred == "heuristic":
        return heuristic(op, n, k, tokens)
    row = _row(key(op, n, k), tokens)
    if row is not None:
        return row[0]
    if tokens > _RULED or op == "logits":
        return None
    if halves(op) * n * k >= _HEAVY:
        return heavy(op, n, k) if name == str(BUCKETS[0]) else None
    return (few_tokens(op, n, k) if tokens <= _FEW else None) or heuristic(op, n, k, tokens)


def slots_of(tile: Tile, k: int) -> tuple[int, int, int]:
    """Steps of one program; slots of activations and of weights."""
    steps = k // tile.split // tile.bk
    return steps, min(tile.stages, steps), min(tile.ahead or steps, steps)


@cache
def sm90_reason(tile: Tile, n: int, k: int, *, gated: bool, size: int = 2) -> str | None:
    """None if the Hopper kernel takes a product of `n` outputs (of one half where gated) and `k` inputs; else why not.

    Args:
        size: bytes a value; 1: whether the kernel of scaled_gemm_sm90.py takes it.
    """
    if n % tile.bn or k % (tile.bk * tile.split):
        return f"{n} x {k} is not whole tiles of {tile.bn} x {tile.bk * tile.split}"
    if tile.bm % (16 * tile.warps) or tile.bk * size % 128:
        return f"a warp takes 16 rows, and a swizzled tile has {128 // size} columns"
    steps, x_slots, w_slots = slots_of(tile, k)
    shared = size * tile.bk * (x_slots * tile.bm + w_slots * tile.bn * (2 if gated else 1)) + 8 * (x_slots + w_slots)
    if shared > _MAX_SHARED:
        return f"{shared} bytes of shared memory are over the limit of {_MAX_SHARED}"
    if steps > min(x_slots, w_slots) == 1:
        return "a slot is filled again in the step after its own, so that a single one would be waited for empty"
    return None if steps <= 64 else f"{steps} steps are too many to unroll"


@cache
def choose_codes(op: Op, n: int, k: int, tokens: int, otherwise: Tile) -> Tile | None:
    """The same for e4m3 codes on both sides, with one scale a side or one a row; None: the library serves it.

    What was measured for codes comes first. Where nothing was, up to 128 tokens of a shape of the table take the Hopper
    kernel with the cut that bf16 has; it reads the same bytes in half the steps. That holds where bf16 is better off
    without it, too, if its tiles have the rows for it: twice the weights are then more than shared memory holds. What
    does not fit even so, as weights of 4096 x 12288 at 64 tokens, is the plain kernel's.

    Args:
        otherwise: the plain kernel's tile, for all that is left up to 1024 tokens.
    """
    row = _row(key(op, n, k, codes=True), tokens)
    if row is not None:
        return row[0]
    if tokens > BUCKETS[-1]:
        return None
    row = _row(key(op, n, k), tokens) if tokens <= _RULED else None
    if row is None or row[0] is None or row[0].bm < 64:
        return otherwise
    bk = _CODES if k % (_CODES * row[0].split) == 0 else _CODES // 2
    tile = replace(row[0], bk=bk, kind="sm90")
    return tile if sm90_reason(tile, n, k, gated=op == "gated", size=1) is None else otherwise


def prefers_epilogue(op: Op, n: int, k: int, tokens: int) -> bool:
    name, own = key(op, n, k), bucket(tokens)
    preferred = _preferred.get(name, {}).get(own, "table")
    return preferred == "epilogue" or (preferred == "table" and (name, own) in epilogues())


def halves(op: Op) -> int:
    """Weights that one product reads: a gated one has two."""
    return 2 if op == "gated" else 1


def heavy(op: Op, n: int, k: int) -> Tile:
    """For 16 tokens and weights that many waves of programs read: the plain kernel, whose next loads are always on
    their way. Kernels that take all their weights ahead of the wait begin every wave with an empty pipeline. A layer's
    products of Qwen3-8B take 105 µs with such tiles, 114 by the library, 133 by the best of the others (H200).
    """
    if op == "gated":
        return Tile(16, 32, 128, 1, 4, 4)
    split = max((1, 2, 3, 4), key=lambda pieces: _fill(n // 64 * pieces)) if op == "partial" else 1
    # Programs half as wide read the same rows of x twice as often: only where that fills the last wave better.
    bn = 32 if op == "linear" and _fill(n // 32) > 1.1 * _fill(n // 64) else 64
    return Tile(16, bn, 256 if k % (256 * split) == 0 else 128, split, 4, 4)


def _fill(programs: int) -> float:
    """Busy share of the multiprocessors over whole waves."""
    return programs / (-(-programs // _SMS) * _SMS)


def few_tokens(op: Op, n: int, k: int) -> Tile | None:
    """For steps of generating, whose time is that of the weights' bytes: the Hopper kernel, with as many weights on
    their way as shared memory holds (4.2 TB/s times a microsecond are 36 KiB an SM).

    Returns:
        None for weights of less than 8 MiB, and for shapes that are not whole tiles.
    """
    if halves(op) * n * k < 4 << 20 or n % 64 or k % 128:
        return None
    if op == "gated":
        return Tile(64, 64, 64, 1, 4, 3, "sm90", ahead=5) if k <= 64 * 64 else None
    split = 1
    while op == "partial" and split < 8 and (n // 64) * split < 128 and k % (256 * split) == 0:
        split *= 2
    return Tile(64, 64, 128, split, 4, 3, "sm90", ahead=8) if k // split <= 64 * 128 else None


def heuristic(op: Op, n: int, k: int, tokens: int) -> Tile:
    """A sane tile for any shape: fill one wave, split only where the product is left in pieces anyway."""
    b = next((b for b in BUCKETS if tokens <= b), BUCKETS[-1])
    bm = min(64, b) if b <= 256 else 128
    bn = 32 if op == "gated" or b <= 128 else 64
    while bn > 16 and bn >= 2 * n:
        bn //= 2
    bk = 64 if k >= 64 else max(16, 1 << (k - 1).bit_length())
    split = 1
    if op == "partial":
        programs = -(-b // bm) * -(-n // bn)
        while split < 8 and programs * split * 2 <= 2 * _SMS and k >= 256 * split:
            split *= 2
    return Tile(bm, bn, bk, split, 4, 4)
