"""Rows of one request, gathered over however many batches they came from, in the request's own order.

Knows output specs and arrays; knows neither the engine nor sockets.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from rose.errors import NonFinite
from rose.models.base import OutputSpec
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray, describe_tensor, fill_values
from rose.server.validate import Work

_NO_ROWS = np.empty(0, dtype=np.intp)


class Answer:
    """Collects the outputs of one request.

    Attributes:
        message: what will travel; all but the values is there from the start, which is made while the device works.
    """

    __slots__ = ("_left", "_outputs", "_work", "message")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._left = len(work.sequences)
        self.message = pb.EmbedResponse(prompt_tokens=work.tokens)
        # Made in place: a message that is put into another is copied.
        add = self.message.outputs.add
        self._outputs = [_Rows(add(name=name), spec, work) for name, spec in work.specs.items()]

    @property
    def complete(self) -> bool:
        return self._left == 0

    def put(
        self,
        first: int,
        batch: Mapping[str, AnyArray],
        start: int,
        end: int,
        splits: tuple[int, ...],
        span_splits: tuple[int, ...] = (),
    ) -> None:
        """Items `start` .. `end` of a batch are items `first` and following of the request.

        Args:
            batch: output name -> [rows, dimension]; nobody writes to the arrays any more. They are copied, except
                where they hold the whole request, whose answer leaves at once.
            splits: item i of the batch has rows splits[i] .. splits[i + 1] of per-token outputs,
            span_splits: and these of pooled ones; empty where each has one row.
        """
        for output in self._outputs:
            output.put(first, batch[output.name], start, end, splits if output.spec.per_token else span_splits)
        self._left -= end - start

    def fill(self) -> None:
        """Add the finished values to the message, cut vectors normalised again where the model normalises.

        Raises:
            NonFinite: a cut vector is all zeros and has no direction.
        """
        for output in self._outputs:
            fill_values(output.tensor, output.finished(self._work))


class _Rows:
    """The rows of one output.

    Attributes:
        offsets: first row of each item and the end of the last; None: item i has row i.
        tensor: where they go once they are all there.
    """

    __slots__ = ("_count", "_values", "_width", "name", "offsets", "spec", "tensor")

    def __init__(self, output: pb.Output, spec: OutputSpec, work: Work) -> None:
        self.name = output.name
        self.spec = spec
        self.offsets: list[int] | None = None
        if spec.per_token:
            skip = spec.skip_tokens
            self.offsets = list(accumulate((max(len(ids) - skip, 0) for ids in work.sequences), initial=0))
        elif work.spans is not None:
            self.offsets = list(accumulate(map(len, work.spans), initial=0))
        self._width = work.dimensions or spec.dimension
        self._count = self.offsets[-1] if self.offsets else len(work.sequences)
        self._values: AnyArray | None = None
        self.tensor = output.values
        describe_tensor(self.tensor, spec.dtype, (self._count, self._width))
        if self.offsets is not None:
            output.splits.extend(self.offsets)

    def put(self, first: int, batch: AnyArray, start: int, end: int, splits: Sequence[int]) -> None:
        if self._width < batch.shape[1]:
            batch = batch[:, : self._width]
        if not splits:
            self._place(first, batch[start:end])
            return
        skip = self.spec.skip_tokens
        if not skip:
            self._place(first, batch[splits[start] : splits[end]])
            return
        for item, (begin, stop) in enumerate(pairwise(splits[start : end + 1]), first):
            self._place(item, batch[min(begin + skip, stop) : stop])

    def _place(self, item: int, rows: AnyArray) -> None:
        if len(rows) == self._count:
            self._values = rows
            return
        if self._values is None:
            self._values = np.empty((self._count, self._width), dtype=self.spec.dtype)
        at = item if self.offsets is None else self.offsets[item]
        self._values[at : at + len(rows)] = rows

    def finished(self, work: Work) -> AnyArray:
        """Once every item was put."""
        assert self._values is not None
        if not self.spec.normalized or self._width == self.spec.dimension:
            return self._values
        try:
            return renormalize(self._values, self.name, self._rows_of_empty_spans(work))
        except NonFinite as error:
            if self.offsets is not None and error.index is not None:
                error.index = bisect_right(self.offsets, error.index) - 1
            raise

    def _rows_of_empty_spans(self, work: Work) -> npt.NDArray[np.bool_] | None:
        if self.offsets is None or work.spans is None:
            return None
        bounds = np.concatenate(work.spans)
        empty: npt.NDArray[np.bool_] = bounds[:, 0] == bounds[:, 1]
        return empty


def renormalize(
    values: AnyArray, name: str, may_be_zero: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float32]:
    """[rows, d] rows scaled to unit length, in fp32.

    Args:
        may_be_zero: [rows], those that have nothing to show and stay zero.

    Raises:
        NonFinite: another row is all zeros; `index` is that of the row.
    """
    norms = np.linalg.norm(values.astype(np.float32, copy=False), axis=1, keepdims=True)
    if not norms.all():
        zero = norms[:, 0] == 0
        without_direction = zero if may_be_zero is None else zero & ~may_be_zero
        if without_direction.any():
            raise NonFinite(
                f"the first {values.shape[1]} dimensions of output {name!r} are all zero and cannot be normalised",
                index=int(np.flatnonzero(without_direction)[0]),
            )
        norms[zero] = 1
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
        row = values[0]
        least = most = float(row.dot(row))
    else:
        squares = np.einsum("ij,ij->i", values, values)
        least, most = float(squares.min()), float(squares.max())
    if most < math.inf and (least > 0 or not spec.normalized):
        return _NO_ROWS
    bad = ~np.isfinite(values).all(axis=1)
    if spec.normalized:
        bad |= ~values.any(axis=1)
    return np.flatnonzero(bad)
