"""The device an engine process runs on: picked, described, asked whether it still answers.

Knows torch's devices; knows neither models nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rose.errors import StartupError

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Device memory captured graphs may take where nothing else is asked for.
GRAPH_BYTES = 4 << 30


def pick_device(name: str) -> torch.device:
    """Raises StartupError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"device {name!r}: torch sees no CUDA device")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Raises StartupError for a name that is none."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise StartupError(f"dtype {name!r}: expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def describe_device(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def device_alive(device: torch.device) -> bool:
    """Whether the device still answers. After an illegal access CUDA never does again in this process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
