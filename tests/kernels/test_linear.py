"""Products at odd shapes against fp64, every activation, split counts, the gated pair, and the tile table."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from rose.kernels import activation, linear, tiles
from rose.kernels import logits as head
from rose.kernels.gemm import gemm, gemm_gated
from rose.kernels.gemm_sm90 import gemm_sm90, gluon, runs_sm90
from rose.kernels.tiles import Tile, sm90_reason

SHAPES = [(1, 16, 16), (5, 24, 40), (37, 50, 100), (64, 32, 64), (70, 129, 33)]  # T, N, K
TILE = Tile(16, 16, 32, 1, 4, 3)
# T, N, K and a tile of the Hopper kernel: slots used again, one step, two warpgroups, tails of T, few tiles ahead.
SM90 = [
    (128, 256, 1024, Tile(64, 32, 64, 1, 4, 4, "sm90")),
    (1, 64, 64, Tile(64, 32, 64, 1, 4, 4, "sm90")),
    (333, 192, 512, Tile(128, 64, 128, 1, 8, 2, "sm90", ahead=2)),
    (70, 96, 384, Tile(64, 32, 128, 1, 4, 3, "sm90", late_launch=True)),
    (200, 128, 256, Tile(128, 128, 64, 1, 8, 3, "sm90", ahead=2, late_launch=True)),
    (1111, 256, 512, Tile(128, 128, 64, 1, 4, 3, "sm90", ahead=3)),
]
ACTIVATIONS = {
    None: lambda x: x,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp_min(0),
    "silu": lambda x: x * torch.sigmoid(x),
}


def product(x, weight):
    return x.double() @ weight.double().T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(place, close, shape, with_bias):
    T, N, K = shape
    x, weight, bias = place.randn(T, K), place.randn(N, K), place.randn(N) if with_bias else None
    expected = product(x, weight) + (0 if bias is None else bias.double())
    close(gemm(x, weight, bias, None, TILE, pieces=False), expected)
    close(linear.linear_ref(x, weight, bias), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(place, close, name):
    x, weight, bias = place.randn(37, 100), place.randn(50, 100, scale=0.2), place.randn(50)
    expected = ACTIVATIONS[name](product(x, weight) + bias.double())
    close(gemm(x, weight, bias, name, TILE, pieces=False), expected)
    close(linear.linear_ref(x, weight, bias, name), expected, factor=2)


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n])
def test_activation_kernels(place, close, name):
    x = place.randn(7, 2 * 1111, scale=3)
    gate, up = x.double().chunk(2, -1)
    close(activation.gated_activation_triton(x, name), ACTIVATIONS[name](gate) * up)
    changed = x.clone()
    out = activation.activate_in_place_triton(changed, name)
    assert out.data_ptr() == changed.data_ptr()
    close(out, ACTIVATIONS[name](x.double()))


def test_activations_far_from_zero(place):
    """Finite in, finite out; not-a-number stays what it is instead of turning into a plausible value."""
    x = torch.tensor([[-1e4, -60.0, -12.0, 0.0, 12.0, 1e4, float("nan")]], device=place.device, dtype=place.dtype)
    for name, expected in ACTIVATIONS.items():
        if name is not None:
            out = activation.activate_in_place_triton(x.clone(), name)[0]
            assert torch.isfinite(out[:-1]).all(), name
            torch.testing.assert_close(out[:-1].double(), expected(x[0, :-1].double()), rtol=1e-2, atol=1e-6)
            assert torch.isnan(out[-1]), name


@pytest.mark.parametrize(("split", "k"), [(2, 128), (3, 100), (4, 64), (8, 40)])
def test_split_products(place, close, split, k):
    """Pieces sum to the product, also where the last ones are short or empty."""
    x, weight = place.randn(37, k), place.randn(50, k)
    out = gemm(x, weight, None, None, dataclasses.replace(TILE, split=split), pieces=True)
    assert out.shape == (split, 37, 50)
    assert out.dtype == torch.float32
    close(out.double().sum(0), product(x, weight))


def test_one_piece_is_the_product_in_the_models_dtype(place, close):
    x, weight = place.randn(5, 64), place.randn(24, 64)
    out = gemm(x, weight, None, None, TILE, pieces=True)
    assert out.shape == (1, 5, 24)
    assert out.dtype == place.dtype
    close(out[0], product(x, weight))


def exactly(out, x, weight):
    """In fp32, as near to the product as fp32 sums come: a half's rounding would be 30 times as far."""
    assert out.dtype == torch.float32
    expected = product(x, weight)
    assert (out.double() - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("shape", [(1, 96, 64), (5, 50, 100)])
def test_logits_are_not_rounded_to_halves(place, shape):
    T, N, K = shape
    x, weight = place.randn(T, K), place.randn(N, K)
    exactly(linear.run_tile(x, weight, None, None, TILE, pieces=False, gated=False, dtype=torch.float32), x, weight)
    exactly(head.logits(x, weight), x, weight)


def test_a_head_without_a_row_is_the_librarys():
    for tokens in (1, 16, 64, 128, 1024):
        assert tiles.choose("logits", 4096, 1024, tokens) is None
        with tiles.preferring(tiles.key("logits", 4096, 1024), tiles.bucket(tokens), "heuristic"):
            assert tiles.choose("logits", 4096, 1024, tokens) is not None


@pytest.mark.parametrize("shape", SHAPES)
def test_gated(place, close, shape):
    T, N, K = shape
    x, weight = place.randn(T, K), place.randn(2 * N, K, scale=K**-0.5)
    gate, up = product(x, weight).chunk(2, -1)
    close(gemm_gated(x, weight, "silu", TILE), F.silu(gate) * up)
    close(linear.linear_gated_ref(x, weight), F.silu(gate) * up, factor=2)


def test_a_rows_value_does_not_depend_on_its_place(place):
    """The same row gives the same bits in any tile row and with any neighbours."""
    if place.device.type == "cpu":
        pytest.skip("the interpreter multiplies through NumPy, whose last bits depend on the row")
    x, weight = place.randn(40, 100), place.randn(50, 100)
    tile = dataclasses.replace(TILE, split=2)
    whole = gemm(x, weight, None, None, tile, pieces=True)
    turned = gemm(x.roll(7, 0), weight, None, None, tile, pieces=True)
    assert torch.equal(whole.roll(7, 1), turned)


def test_a_product_that_is_not_whole_tiles_is_refused():
    """Halves of 96 in tiles of 64 once gave NaN."""
    if gluon is None:
        pytest.skip("needs Triton's Gluon")
    with pytest.raises(ValueError, match="96 x 64 is not whole tiles of 64 x 64"):
        gemm_sm90(torch.ones(1, 64), torch.ones(192, 64), None, "silu", Tile(64, 64, 64, 1, 4, 2, "sm90"),
                  pieces=False, gated=True)  # fmt: skip


@pytest.mark.parametrize(("op", "n", "k"), [("linear", 3072, 2048), ("partial", 2048, 2048), ("gated", 3072, 1280)])
def test_few_tokens_of_a_shape_nobody_measured(op, n, k):
    """Weights of 8 to 16 MiB: the Hopper kernel, whole tiles, within shared memory."""
    for tokens in (1, 8, 64):
        tile = tiles.choose(op, n, k, tokens)
        assert tile.kind == "sm90"
        assert sm90_reason(tile, n, k, gated=op == "gated") is None
    assert tiles.choose(op, n, k, 65).kind == "plain"


def test_few_tokens_take_what_was_measured_for_64():
    rows = tiles._table()["gated:3072x1024"]
    assert tiles.choose("gated", 3072, 1024, 1) == tiles.choose("gated", 3072, 1024, 33) == rows["64"]
    assert tiles.choose("linear", 384, 384, 1).kind == "plain"


@pytest.mark.parametrize("op", ["linear", "partial", "gated", "logits"])
@pytest.mark.parametrize("kind", ["plain", "prefetch", "sm90"])
def test_every_product_runs_the_kernel_its_tile_names(monkeypatch, op, kind):
    """Pieces once went through the plain kernel whatever their tile said, which was right and 8 % slower."""
    ran = []
    for name in ("gemm", "gemm_gated", "gemm_sm90"):
        monkeypatch.setattr(linear, name, lambda *args, name=name, **kwargs: ran.append(name))
    tile = dataclasses.replace(TILE, kind=kind)
    for module in (linear, head):
        monkeypatch.setattr(module, "tile_of", lambda *args: tile)
    x, weight = torch.randn(3, 64), torch.randn(128, 64)
    serve = {"partial": linear.linear_partial, "gated": linear.linear_gated, "logits": head.logits}
    serve.get(op, linear.linear)(x, weight)
    expected = "gemm_sm90" if kind == "sm90" else "gemm_gated" if op == "gated" else "gemm"
    assert ran == [expected]


@pytest.mark.parametrize(("T", "N", "K", "tile"), SM90)
def test_sm90(place, close, T, N, K, tile):
    """Random data, outputs poisoned: all epilogues of gemm_sm90.py against fp64."""
    if place.device.type == "cpu" or place.dtype != torch.bfloat16 or not runs_sm90(place.device):
        pytest.skip("needs Hopper and 16-bit values; there is no interpreter for Gluon")

    def run(x, weight, bias, activation, tile, pieces=False, gated=False):
        return linear.run_tile(x, weight, bias, activation, tile, pieces=pieces, gated=gated)

    x, weight, bias = place.randn(T, K), place.randn(N, K, scale=K**-0.5), place.randn(N)
    for name in ACTIVATIONS:
        close(run(x, weight, bias, name, tile), ACTIVATIONS[name](product(x, weight) + bias.double()))
    both = place.randn(2 * N, K, scale=K**-0.5)
    if sm90_reason(tile, N, K, gated=True) is None:
        gate, up = product(x, both).chunk(2, -1)
        close(run(x, both, None, "silu", tile, gated=True), F.silu(gate) * up)
    close(run(x, weight, None, None, tile, pieces=True)[0], product(x, weight))
    exactly(linear.run_tile(x, weight, None, None, tile, pieces=False, gated=False, dtype=torch.float32), x, weight)
    split = dataclasses.replace(tile, split=K // tile.bk)
    pieces = run(x, weight, None, None, split, pieces=True)
    close(pieces.double().sum(0), product(x, weight))
    assert torch.equal(pieces.roll(7, 1), run(x.roll(7, 0), weight, None, None, split, pieces=True))


def test_rows_past_the_tokens_are_not_touched(place):
    """Memory right behind x and out holds NaN: it is neither summed nor overwritten."""
    behind = torch.full((48, 64), float("nan"), device=place.device, dtype=place.dtype)
    behind[:33] = place.randn(33, 64)
    out = gemm(behind[:33], place.randn(24, 64), None, None, TILE, pieces=False)
    assert torch.isfinite(out).all()


def test_public_functions(place, close):
    """Whatever serves a shape on this device, the numbers are those of the reference."""
    for T in (1, 100, 1500):
        if place.device.type == "cpu" and T > 100:
            continue
        x, w, b = place.randn(T, 128), place.randn(96, 128, scale=0.1), place.randn(96)
        close(linear.linear(x, w, b, "gelu"), ACTIVATIONS["gelu"](product(x, w) + b.double()), factor=2)
        close(linear.linear_partial(x, w).double().sum(0), product(x, w))
        gate, up = product(x, w).chunk(2, -1)
        close(linear.linear_gated(x, w), F.silu(gate) * up, factor=2)


def test_epilogue_of_a_split_product_is_refused(place):
    with pytest.raises(ValueError, match="no epilogue"):
        gemm(place.randn(4, 64), place.randn(16, 64), None, "gelu", dataclasses.replace(TILE, split=2), pieces=True)


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        linear.linear(torch.ones(1, 2), torch.ones(1, 2), None, "swish")


def test_table_holds_only_launchable_tiles():
    for name, rows in tiles._table().items():
        kind, shape = name.split(":")
        n, k = map(int, shape.split("x"))
        op, size = kind.removeprefix("fp8-"), 1 if kind.startswith("fp8-") else 2
        assert op in ("linear", "partial", "gated", "logits")
        for bucket, tile in rows.items():
            assert bucket == tiles.LARGE or int(bucket) in tiles.BUCKETS
            if tile is not None:
                assert tile.split == 1 or op == "partial"
                assert min(tile.bm, tile.bn, tile.bk) >= 16
                assert tile.kind != "sm90" or sm90_reason(tile, n, k, gated=op == "gated", size=size) is None


@pytest.mark.parametrize("op", ["linear", "partial", "gated"])
def test_choice_is_the_same_inside_a_bucket(op):
    for low, high in zip((0, *tiles.BUCKETS), tiles.BUCKETS, strict=False):
        choices = {tiles.choose(op, 1024, 1024, tokens) for tokens in range(low + 1, high + 1)}
        assert len(choices) == 1
    assert tiles.choose(op, 1024, 1024, tiles.BUCKETS[-1] + 1) is None


@pytest.mark.parametrize("bucket", tiles.BUCKETS)
@pytest.mark.parametrize(("n", "k"), [(8, 8), (100, 30), (384, 1536), (1024, 4096), (151936, 1024), (4096, 12288)])
def test_heuristic_gives_launchable_tiles(bucket, n, k):
    for op in ("linear", "partial", "gated"):
        tile = tiles.heuristic(op, n, k, bucket)
        assert min(tile.bm, tile.bn, tile.bk) >= 16
        assert tile.split == 1 or op == "partial"
        assert tile.stages * (tile.bm + 2 * tile.bn) * tile.bk * 2 <= 227 * 1024


def test_a_preference_holds_inside_its_context_only():
    name, shape = tiles.key("partial", 1024, 1024), ("partial", 1024, 1024, 128)
    before = tiles.choose(*shape)
    assert before is not None
    with tiles.preferring(name, "128", "library"):
        assert tiles.choose(*shape) is None
        assert tiles.choose("partial", 1024, 1024, 64) is not None
        with tiles.preferring(name, "64", "heuristic"):
            assert tiles.choose(*shape) is None
            assert tiles.choose("partial", 1024, 1024, 64) == tiles.heuristic("partial", 1024, 1024, 64)
    assert tiles.choose(*shape) == before


@pytest.mark.parametrize("op", ["linear", "partial", "gated"])
def test_heavy_weights_that_nobody_measured(op):
    """16 tokens keep loads on their way through all waves; more are the library's, as is all beyond 128 tokens."""
    tile = tiles.choose(op, 4096 + 64, 4096, 16)
    assert (tile.bm, tile.kind) == (16, "plain")
    assert tile.stages * (tile.bm + tiles.halves(op) * tile.bn) * tile.bk * 2 <= 227 * 1024
    assert tiles.choose(op, 4096 + 64, 4096, 17) is None
    assert tiles.choose(op, 640, 640, 128) == tiles.heuristic(op, 640, 640, 128)
    assert tiles.choose(op, 640, 640, 129) is None


def test_a_tile_that_would_wait_for_an_empty_slot_is_refused():
    """One slot of weights for four steps: the kernel waited for the second step's before it had asked for them."""
    tile = Tile(128, 128, 64, 1, 8, 3, "sm90", ahead=1)
    assert "waited for empty" in sm90_reason(tile, 128, 256, gated=False)
    assert sm90_reason(tile, 128, 64, gated=False) is None
    with pytest.raises(ValueError, match="waited for empty"):
        gemm_sm90(torch.empty(1, 256), torch.empty(128, 256), None, None, tile, pieces=False, gated=False)
