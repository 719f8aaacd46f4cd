"""What arrives at each layer over real texts: the largest magnitude, and how the others are spread.

Magnitudes are counted in bins of 1/32 of an octave, by the upper bits of their fp32 form: a percentile is right to 3 %,
over any number of tokens. Knows layers; knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SHIFT = 18  # of 23 bits behind the point five stay: 32 bins an octave
_BINS = 1 << (31 - _SHIFT)


class Observer:
    """Magnitudes of one layer's inputs.

    Attributes:
        largest: the largest; 0.0 before anything was seen.
        odd: values that were not finite.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(_BINS, dtype=torch.int64)
        self.largest = 0.0
        self.odd = 0

    def see(self, x: Tensor) -> None:
        v = x.detach().float().abs().flatten()
        finite = v[v.isfinite()]
        self.odd += v.numel() - finite.numel()
        if not finite.numel():
            return
        self.largest = max(self.largest, float(finite.max()))
        bins = finite.view(torch.int32) >> _SHIFT
        self.counts += torch.bincount(bins, minlength=_BINS).cpu()

    def percentile(self, share: float) -> float:
        """The magnitude that `share` percent of the values do not exceed, at most 3 % above it; 100: the largest."""
        if share >= 100:
            return self.largest
        seen = self.counts.cumsum(0)
        at = int(torch.searchsorted(seen, torch.tensor(float(seen[-1]) * share / 100.0)))
        edge = torch.tensor([(min(at, _BINS - 1) + 1) << _SHIFT], dtype=torch.int32).view(torch.float32)
        return min(float(edge), self.largest)

    def beyond(self, bound: float) -> float:
        """Share of the values in bins wholly above `bound`, which a clamp there would cut."""
        total = int(self.counts.sum())
        first = (int(torch.tensor([bound]).view(torch.int32)) >> _SHIFT) + 1
        return int(self.counts[first:].sum()) / total if total else 0.0


class Observed(nn.Module):
    """Stands where a linear layer stood, tells the observer what arrives, and lets it do its work."""

    def __init__(self, layer: nn.Module, observer: Observer) -> None:
        super().__init__()
        self.layer = layer
        self.observer = observer

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        self.observer.see(x)
        return self.layer(x)  # type: ignore[no-any-return]

    def partial(self, x: Tensor) -> Tensor:
        self.observer.see(x)
        return self.layer.partial(x)  # type: ignore[no-any-return, operator]

    def pieces(self, x: Tensor) -> Tensor:
        self.observer.see(x)
        return self.layer.pieces(x)  # type: ignore[no-any-return, operator]
