"""A model named by a hub id: a snapshot through `huggingface_hub`, from its own cache where there is no network.

Knows hub ids and file patterns; knows neither architectures nor tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from rose.errors import PullError

# Weights as safetensors only: the other formats can run code when they are read.
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# Copies of the same weights for other runtimes, which some repositories keep beside them.
_UNWANTED = ("onnx/*", "openvino/*", "coreml/*", "gguf/*", "original/*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether `name` reads as `owner/model` or `owner/model@revision`."""
    return _HUB_ID.fullmatch(name) is not None


def pull_snapshot(name: str) -> Path:
    """The folder of `owner/model[@revision]`.

    Raises:
        PullError: no such model, no access, or no network and nothing in the hub's cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
        )
    except LocalEntryNotFoundError as error:
        raise PullError(
            f"cannot get {name}: the hub cannot be reached and its cache on this machine does not hold it whole.\n"
            f"  by hand: copy the model's folder here and give its path instead of {name!r}."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise PullError(f"cannot get {name} from the hub: {_first_line(error)}") from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise PullError(f"{name} is on the hub but has no config.json: not a model in the Transformers layout")
    return path


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
