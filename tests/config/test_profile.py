"""Profiles on disk: what is written is read, what cannot be is said clearly, and the right one of several is used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rose.config.profile import (
    AttentionGrid,
    AttentionShape,
    Machine,
    ModelNumbers,
    ModelShape,
    Point,
    Profile,
    read_profile,
    write_profile,
)
from rose.config.profile_files import SHIPPED, find_profile, own_folder, stale
from rose.errors import CheckpointError, StartupError

HERE = Machine(device="NVIDIA H200", driver="580.159", packages={"torch": "2.11.0", "triton": "3.6.0"})
SHAPE = AttentionShape(num_heads=16, num_kv_heads=8, head_dim=128, dtype="bfloat16", causal=False)
MODEL = ModelShape(hidden_size=1024, num_layers=28, intermediate_size=3072, attention=SHAPE)


def profile(machine: Machine = HERE, us: float = 100.0, **changes: object) -> Profile:
    point = Point(
        tokens=512, sequences=1, max_length=512, us={"flash_attention4": us}, spread_us={"flash_attention4": 0}
    )
    numbers = ModelNumbers(
        shape=MODEL,
        name="pplx",
        online_tokens=2048,
        bulk_tokens=16384,
        saturation=((512, 900.5), (1024, 1500.0)),
        launch=((512, 700.0, 1500.0, 900.5),),
        threads=(("float32", 2, 10.0),),
    )
    made = Profile(
        machine=machine,
        source="a test",
        grids=(AttentionGrid(shape=SHAPE, points=(point,), excluded={"flashinfer2": "wrong at 1 x 64"}),),
        models=(numbers,),
        products={"linear:3072x1024": {"512": {"table": 9.0, "library": 8.0}}},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_profile(profile(), tmp_path / "deep" / "p.json")
    assert read_profile(tmp_path / "deep" / "p.json") == profile()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.json"]


def changed(tmp_path: Path, edit) -> Path:
    write_profile(profile(), tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text())
    edit(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    return tmp_path / "p.json"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d.update(version=2), "version 2, and this ROSE reads version 1"),
        (lambda d: d.pop("version"), "version is missing"),
        (lambda d: d["machine"].pop("device"), "device is missing"),
        (lambda d: d.update(grids=3), "grids is 3, and must be a list"),
        (lambda d: d["grids"][0]["points"][0].update(us={}), "needs the time of a backend"),
        (lambda d: d["grids"][0]["points"][0]["us"].update(flash_attention4=float("nan")), "which is no time"),
        (lambda d: d["grids"][0]["points"][0]["us"].update(flash_attention4=-3), "which is no time"),
        (lambda d: d["grids"][0]["points"][0].update(tokens="many"), "tokens is 'many'"),
        (lambda d: d["grids"][0]["shape"].update(layout="square"), "layout is 'square'"),
        (lambda d: d["models"][0].update(online_tokens=99999), "online_tokens (99999) is more than bulk_tokens"),
        (lambda d: d["models"][0].update(saturation=[[1, 2, 3]]), "saturation holds [1, 2, 3]"),
        (lambda d: d["models"][0].update(saturation=[[64, float("nan")]]), "and nan is no time"),
        (lambda d: d["models"][0].update(saturation=[[-4, 5.0]]), "and -4 is no size"),
        (lambda d: d["models"][0].update(num_threads=10**9), "num_threads is 1000000000, and must be at most"),
        (lambda d: d["models"][0].update(bulk_tokens=10**12), "bulk_tokens is 1000000000000, and must be at most"),
        (lambda d: d["models"][0].update(fastest_dtype="float7"), "fastest_dtype is 'float7', and must be one of"),
        (lambda d: d["products"].update({"linear:1x1": []}), "holds a list where an object is expected"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_named(tmp_path: Path, edit, said: str) -> None:
    path = changed(tmp_path, edit)
    with pytest.raises(CheckpointError) as error:
        read_profile(path)
    assert said in error.value.message
    assert str(path) in error.value.message
    found = find_profile("auto", HERE, SHAPE, MODEL, folders=[tmp_path])
    assert found.grid is None
    assert found.numbers is None
    (note,) = found.notes
    assert note.startswith("the profile cannot be used, and defaults serve:")
    assert said in note


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\x01"])
def test_rubbish_is_told_of_and_defaults_serve(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    for asked in ("auto", str(tmp_path / "p.json")):
        found = find_profile(asked, HERE, SHAPE, folders=[tmp_path])
        assert found.grid is None
        assert "p.json" in found.notes[0]


def test_a_good_file_serves_beside_a_corrupt_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    write_profile(profile(), tmp_path / "b.json")
    found = find_profile("auto", HERE, SHAPE, MODEL, folders=[tmp_path])
    assert found.grid == profile().grids[0]
    assert found.numbers == profile().models[0]
    assert found.products == profile().products
    assert found.paths == (tmp_path / "b.json",)
    assert len(found.notes) == 1


def test_other_versions_are_noticed_in_one_line_and_the_file_is_used(tmp_path: Path) -> None:
    write_profile(profile(), tmp_path / "p.json")
    newer = Machine(device=HERE.device, driver="590.1", packages={"torch": "2.11.0", "triton": "3.7.0"})
    found = find_profile("auto", newer, SHAPE, MODEL, folders=[tmp_path])
    assert found.grid is not None
    (note,) = found.notes
    assert "measured with driver 580.159 (here 590.1), triton 3.6.0 (here 3.7.0): it is used" in note
    assert "\n" not in note
    assert stale(HERE, HERE) == ""
    assert stale(HERE, Machine(device=HERE.device, packages={"torch": "2.11.0"})) == "triton 3.6.0 (here missing)"


def test_a_file_of_another_device_is_never_used(tmp_path: Path) -> None:
    write_profile(profile(Machine(device="NVIDIA A100")), tmp_path / "p.json")
    quiet = find_profile("auto", HERE, SHAPE, folders=[tmp_path])
    assert quiet.grid is None
    assert quiet.notes == ()
    asked = find_profile(str(tmp_path / "p.json"), HERE, SHAPE)
    assert asked.grid is None
    assert "was measured on NVIDIA A100, this is NVIDIA H200: it is not used" in asked.notes[0]


def test_fresh_before_stale_and_own_before_shipped(tmp_path: Path) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    old = Machine(device=HERE.device, driver="1.0")
    write_profile(profile(us=2.0), shipped / "p.json")

    def used() -> float:
        grid = find_profile("auto", HERE, SHAPE, folders=[own, shipped]).grid
        assert grid is not None
        return grid.points[0].us["flash_attention4"]

    assert used() == 2.0
    write_profile(profile(old, us=3.0), own / "a.json")
    assert used() == 2.0
    write_profile(profile(us=1.0), own / "z.json")
    assert used() == 1.0


def test_shape_and_mode_are_part_of_the_key(tmp_path: Path) -> None:
    write_profile(profile(), tmp_path / "p.json")
    for other in (
        replace(SHAPE, causal=True),
        replace(SHAPE, head_dim=64),
        replace(SHAPE, dtype="float16"),
        replace(SHAPE, window=128),
        replace(SHAPE, layout="paged"),
    ):
        assert find_profile("auto", HERE, other, folders=[tmp_path]).grid is None
    deeper = find_profile("auto", HERE, SHAPE, replace(MODEL, num_layers=36), folders=[tmp_path])
    assert deeper.grid is not None
    assert deeper.numbers is None
    assert deeper.products == {}


def test_none_uses_none_and_a_path_must_exist(tmp_path: Path) -> None:
    write_profile(profile(), tmp_path / "p.json")
    assert find_profile("none", HERE, SHAPE, folders=[tmp_path]).grid is None
    with pytest.raises(StartupError, match=r"--profile: there is no file .*missing\.json"):
        find_profile(str(tmp_path / "missing.json"), HERE, SHAPE)


def test_where_own_profiles_lie() -> None:
    assert own_folder({"ROSE_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c/profiles")
    assert own_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/rose/profiles")
    assert own_folder({}) == Path.home() / ".cache" / "rose" / "profiles"


def test_points_are_called_by_their_shape() -> None:
    def name(tokens: int, sequences: int, bound: int) -> str:
        return Point(tokens=tokens, sequences=sequences, max_length=bound, us={"a": 1.0}).name

    assert name(8192, 16, 512) == "16 x 512"
    assert name(30, 1, 64) == "1 x 30"
    assert name(300, 1, 512) == "1 x 300"
    assert name(2048, 8, 2048) == "8 of 2048"
    assert name(100, 3, 64) == "3 of 100"


def test_every_shipped_profile_can_be_read_and_says_where_it_is_from() -> None:
    shipped = sorted(SHIPPED.glob("*.json"))
    assert shipped
    for path in shipped:
        found = read_profile(path)
        assert found.machine.device
        assert len(found.source) > 20
        for grid in found.grids:
            keys = [(point.tokens, point.sequences, point.max_length) for point in grid.points]
            assert len(set(keys)) == len(keys)
            assert all(len(point.us) > 1 for point in grid.points), "a point compares backends"
