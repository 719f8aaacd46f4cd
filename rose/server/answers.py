"""Rows of one request, gathered over however many batches they came from, in the request's own order.

Knows output specs and arrays; knows neither the engine nor sockets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from rose.errors import NonFinite
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray, tensor_to_proto

_NO_ROWS = np.empty(0, dtype=np.intp)


class Answer:
    """Collects the outputs of `items` sequences.

    Args:
        specs: the outputs asked for.
        dimensions: where vectors are cut, or 0 for whole ones.
    """

    __slots__ = ("_dimensions", "_left", "_rows", "_specs", "_values")

    def __init__(self, specs: Mapping[str, OutputSpec], items: int, dimensions: int) -> None:
        self._specs = specs
        self._dimensions = dimensions
        self._left = items
        self._values: dict[str, AnyArray] = {}
        self._rows: dict[str, list[AnyArray | None]] = {}
        for name, spec in specs.items():
            if spec.per_token:
                self._rows[name] = [None] * items
            else:
                self._values[name] = np.empty((items, dimensions or spec.dimension), dtype=spec.dtype)

    @property
    def complete(self) -> bool:
        return self._left == 0

    def put(self, first: int, batch: Mapping[str, AnyArray], start: int, end: int, splits: tuple[int, ...]) -> None:
        """Copy rows `start` .. `end` of a batch to items `first` and following.

        Args:
            batch: output name -> [B, dimension], or [rows, dimension] with `splits` for per-token outputs.
        """
        count = end - start
        for name, values in self._values.items():
            values[first : first + count] = batch[name][start:end, : values.shape[1]]
        for name, rows in self._rows.items():
            for offset in range(count):
                begin, stop = splits[start + offset], splits[start + offset + 1]
                rows[first + offset] = batch[name][begin:stop].copy()
        self._left -= count

    def outputs(self) -> list[pb.Output]:
        """The finished outputs, cut vectors normalised again where the model normalises.

        Raises:
            NonFinite: a cut vector is all zeros and has no direction.
        """
        return [self._output(name, spec) for name, spec in self._specs.items()]

    def _output(self, name: str, spec: OutputSpec) -> pb.Output:
        if spec.per_token:
            rows = [row for row in self._rows[name] if row is not None]
            splits = accumulate((len(row) for row in rows), initial=0)
            values = cast("AnyArray", np.concatenate(rows))
            return pb.Output(name=name, values=tensor_to_proto(values), splits=splits)
        vectors = self._values[name]
        if spec.normalized and 0 < self._dimensions < spec.dimension:
            vectors = renormalize(vectors, name)
        return pb.Output(name=name, values=tensor_to_proto(vectors))


def renormalize(values: AnyArray, name: str) -> npt.NDArray[np.float32]:
    """[items, d] rows scaled to unit length, in fp32.

    Raises:
        NonFinite: a row is all zeros.
    """
    norms = np.linalg.norm(values.astype(np.float32, copy=False), axis=1, keepdims=True)
    if not norms.all():
        index = int(np.flatnonzero(norms[:, 0] == 0)[0])
        raise NonFinite(
            f"the first {values.shape[1]} dimensions of output {name!r} are all zero and cannot be normalised",
            index=index,
        )
    unit: npt.NDArray[np.float32] = (values / norms).astype(np.float32, copy=False)
    return unit


def faulty_rows(values: AnyArray, spec: OutputSpec) -> npt.NDArray[np.intp]:
    """Rows that must not travel: not finite, or all zeros where rows should have unit length. Mostly none.

    Args:
        values: [rows, dimension].
    """
    if spec.dtype != "float32" or not values.size:
        return _NO_ROWS
    # NaN and infinity survive a sum of squares: one pass clears a whole batch, and shows zero rows on the way.
    if len(values) == 1:
        least = most = float(np.vdot(values, values))
    else:
        squares = np.einsum("ij,ij->i", values, values)
        least, most = float(squares.min()), float(squares.max())
    if most < math.inf and (least > 0 or not spec.normalized):
        return _NO_ROWS
    bad = ~np.isfinite(values).all(axis=1)
    if spec.normalized:
        bad |= ~values.any(axis=1)
    return np.flatnonzero(bad)
