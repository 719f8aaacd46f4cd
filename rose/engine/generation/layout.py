"""Where each part of a generating batch lies in its one packed int32 buffer: for the host, which writes it, and for the
device, which reads it.

Knows shapes; knows neither sequences nor models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.engine.generation.buckets import GenerationKey

# Parts start at multiples of 128 bytes, which vector loads ask for.
ALIGN = 32

Array = npt.NDArray[Any]


class Part(NamedTuple):
    """Elements start .. end of the buffer.

    Attributes:
        columns: of a matrix; 0 for a vector.
        kind: "i" int32, "f" fp32, "l" int64, which takes two elements each.
    """

    name: str
    start: int
    end: int
    columns: int
    kind: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a batch of one key.

    Parts: of a token `ids`, `positions`, `slots`; `cu_seqlens`; of a sequence `kv_lengths`, `lanes`, a row of pages in
    `table`. Of a token to be drawn, in the order of the plan and dummies last: `rows`, the row of the last token before
    it; where some are sampled, `temperature`, `top_k`, `top_p`, `min_p`, `steps`, `seeds`; where some ids are banned,
    `banned` and their `penalties` (-inf, or 0 for filling); and `drawn_lanes` where dummies may stand among the
    sequences, so that `lanes` has another order.

    Attributes:
        width: pages of a sequence in the table.
        size: of the buffer in int32 elements.
    """

    parts: tuple[Part, ...]
    width: int
    size: int


@lru_cache(maxsize=4096)
def layout_of(key: GenerationKey, page_size: int) -> Layout:
    """Remembered, since the same few come again and again."""
    tokens, sequences, draw = key.tokens, key.sequences, key.draw
    width = -(-key.kv_bound // page_size)
    wanted: list[tuple[str, int, int, str]] = [
        *((name, tokens, 0, "i") for name in ("ids", "positions", "slots")),
        ("cu_seqlens", sequences + 1, 0, "i"),
        *((name, sequences, 0, "i") for name in ("kv_lengths", "lanes", "rows")),
        ("table", sequences, width, "i"),
    ]
    if key.padded and 0 < key.decodes < sequences:
        wanted += [("drawn_lanes", sequences, 0, "i")]
    if draw.sampled:
        wanted += [(name, sequences, 0, "f") for name in ("temperature", "top_p", "min_p")]
        wanted += [(name, sequences, 0, "i") for name in ("top_k", "steps")]
        wanted += [("seeds", sequences, 0, "l")]
    if draw.banned:
        wanted += [("banned", sequences, draw.banned, "i"), ("penalties", sequences, draw.banned, "f")]
    parts, start = [], 0
    for name, count, columns, kind in wanted:
        elements = count * (columns or 1) * (2 if kind == "l" else 1)
        parts.append(Part(name, start, start + elements, columns, kind))
        start += -(-elements // ALIGN) * ALIGN
    return Layout(tuple(parts), width, start)


_HOST: dict[str, npt.DTypeLike] = {"f": np.float32, "l": np.int64}
_DEVICE = {"f": torch.float32, "l": torch.int64}


def host_parts(packed: npt.NDArray[np.int32], layout: Layout) -> dict[str, Array]:
    """Writable views by name."""
    views: dict[str, Array] = {}
    for name, start, end, columns, kind in layout.parts:
        view: Array = packed[start:end]
        if kind != "i":
            view = view.view(np.dtype(_HOST[kind]))
        views[name] = view.reshape(-1, columns) if columns else view
    return views


def device_parts(packed: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Views by name, of a buffer on any device."""
    views: dict[str, Tensor] = {}
    for name, start, end, columns, kind in layout.parts:
        view = packed[start:end]
        if kind != "i":
            view = view.view(_DEVICE[kind])
        views[name] = view.view(-1, columns) if columns else view
    return views
