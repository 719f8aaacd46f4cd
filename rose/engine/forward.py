"""One batch through the model: plan its attention, run it, bring the real rows to the host.

Knows the model, its backend and its output specs; knows neither queues nor graphs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionBackend, can_capture, is_fixed
from rose.batch import Batch
from rose.engine.buckets import BatchKey
from rose.engine.graphs import Forward
from rose.engine.lazy_tensor import HostArray
from rose.engine.staging import Staged
from rose.errors import InternalError
from rose.models.base import OutputSpec, ServedModel


class BatchForward:
    """A staged batch, ready for `LazyGraphs.run`."""

    def __init__(self, model: ServedModel, backend: AttentionBackend, staged: Staged) -> None:
        self._model = model
        self._backend = backend
        self._staged = staged
        self._batch: Batch

    def load(self, packed: Tensor, graph_key: BatchKey | None, like: Forward | None = None) -> None:
        views = like._batch if isinstance(like, BatchForward) else None
        self._batch = self._staged.batch(packed, graph_key, views)
        self._batch.attention = self._backend.plan(self._batch, self._staged.slot)

    @property
    def capturable(self) -> bool:
        return self._batch.attention is not None and can_capture(self._batch.attention)

    @property
    def fixed(self) -> bool:
        return self._batch.attention is not None and is_fixed(self._batch.attention)

    def run(self) -> dict[str, Tensor]:
        return self._model(self._batch, self._staged.key.outputs)


def to_host(outputs: Mapping[str, Tensor], specs: Mapping[str, OutputSpec], staged: Staged) -> dict[str, HostArray]:
    """Queue copies of the real rows into host memory of their own.

    On CUDA the arrays are page-locked and filled once the stream has come this far.

    Args:
        outputs: [B, dimension], [S, dimension] where the batch has spans, or [T, dimension] each, dummies last.

    Raises:
        InternalError: the model gave an output of another shape or dtype than it declares.
    """
    hosts: dict[str, HostArray] = {}
    for name in staged.key.outputs:
        value, spec = outputs[name], specs[name]
        expected = (staged.layout.tokens if spec.per_token else staged.pooled_rows, spec.dimension)
        if value.shape != expected or value.dtype is not getattr(torch, spec.dtype):
            raise InternalError(
                f"output {name!r} came as {value.dtype} {tuple(value.shape)}; declared is {spec.dtype} {expected}"
            )
        real = staged.tokens if spec.per_token else staged.rows
        rows = value if real == expected[0] else value[:real]
        # Page-locked memory comes from torch's cache, which hands it out again once copies and views are gone.
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        host.copy_(rows, non_blocking=True)
        hosts[name] = host.numpy()
    return hosts
