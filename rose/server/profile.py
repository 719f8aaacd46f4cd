"""The profile of the model that is served: looked up by its folder, told in the log.

Knows folders and notes; knows neither measurements nor engines.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from rose.attention_backends.base import AttentionBackend
from rose.config import EngineConfig, ModelFolder
from rose.config.profile_files import AUTO, Found, find_profile
from rose.engine.profiles import attention_shape, model_shape, this_machine
from rose.models.base import attention_spec
from rose.select.explain import hint, usage

_log = logging.getLogger(__name__)


def profile_of_folder(folder: ModelFolder, device: torch.device, dtype: torch.dtype, asked: str) -> Found:
    """What there is for this model here, its notes told to the log.

    Raises:
        StartupError: the file that was asked for does not exist.
    """
    spec = attention_spec(folder, device, dtype)
    if folder.generation is not None:
        spec = replace(spec, layout="paged")
    here, shape = this_machine(device), attention_shape(spec)
    found = find_profile(asked, here, shape, model_shape(folder.architecture, shape))
    for note in found.notes:
        _log.warning("%s", note)
    if asked == AUTO and (line := hint(found, here, shape, on_gpu=device.type == "cuda")):
        _log.info("%s", line)
    return found


def tell_profile(found: Found, backend: AttentionBackend, limits: EngineConfig) -> None:
    _log.info("chosen by measurement and by default\n%s", usage(found, backend, limits))
