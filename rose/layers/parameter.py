"""A weight that is served, never trained, and what a module may still compute from its weights."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, on the default device: models are built on `meta` and filled by the weight stream.

    A module names those that stay in fp32 whatever the model runs in: `fp32_parameters`, a set of names.
    """
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


@runtime_checkable
class Builds(Protocol):
    """A module with tables that no checkpoint holds, to be computed once its weights are there."""

    def build(self, device: torch.device) -> None: ...
