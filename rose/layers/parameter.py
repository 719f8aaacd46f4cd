"""A weight that is served, never trained."""

from __future__ import annotations

import torch
from torch import nn


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, on the default device: models are built on `meta` and filled by the weight stream."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
