"""FlashAttention 4 (https://github.com/Dao-AILab/flash-attention, `flash_attn.cute`): nothing to plan.

Its grid comes from the shapes of its tensors alone and every length is read on the device, so one captured launch
serves any split of a graph key. The bounds it is given are host integers that must cover every replay; on Hopper they
only choose between two compilations of the same code, so all batches are given one that always chooses the same.
Loads go by whole tiles: a tile may read rows of the next sequence, weighted zero, so those rows must be finite.
Knows lengths; knows no graphs and no weights.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionSpec
from rose.attention_backends.probe import IMPORT_ERRORS, device_reason, package_reason, shape_reason
from rose.attention_backends.rows import row_offsets, zero_qkv
from rose.batch import AttentionPlan, Batch
from rose.errors import StartupError

HEAD_DIMS = tuple(range(8, 257, 8))
# A bound whose query rows fit one tile (at most 192 rows) would be a second compilation, 2 to 5 s, of the same kernel.
_LEAST_BOUND = 256
# Above this many sequences it adds a kernel that looks up each block's sequence.
_LOOKUP_SEQUENCES = 256


class FlashAttention4Plan:
    """One batch: its offsets on the device and the bound of its lengths."""

    capturable = fixed = True

    def __init__(self, spec: AttentionSpec, cu_seqlens: Tensor, bound: int, attend: Any) -> None:
        self._spec = spec
        self._cu_seqlens = cu_seqlens
        self._bound = bound
        self._attend = attend

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        spec = self._spec
        # Splitting the keys is not there on Hopper, and its heuristic could ask for it: always one split.
        result = self._attend(
            q,
            k,
            v,
            cu_seqlens_q=self._cu_seqlens,
            cu_seqlens_k=self._cu_seqlens,
            max_seqlen_q=self._bound,
            max_seqlen_k=self._bound,
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_size=(spec.window, 0 if spec.causal and spec.window is not None else spec.window),
            num_splits=1,
        )
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out


class FlashAttention4:
    name = "flash_attention4"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._attend: Any = None

    def supports(self, spec: AttentionSpec) -> str | None:
        reason = (
            shape_reason(spec, HEAD_DIMS)
            # Blackwell's kernels of the same package take other shapes and bounds; nothing here was tried there.
            or device_reason(spec, (9, 0), (10, 0))
            or package_reason("flash-attn-4", (4, 0), "has the interface used here")
        )
        if reason is not None:
            return reason
        try:
            self._load()
        except IMPORT_ERRORS as error:
            return f"flash_attn.cute cannot be imported: {error}"
        return None

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        row_offsets(batch)  # an empty sequence hangs the head-dim-256 kernel
        bound = max(batch.max_length, _LEAST_BOUND)
        return FlashAttention4Plan(self._spec, batch.cu_seqlens, bound, self._attend or self._load())

    def warm_up(self, max_sequences: int) -> None:
        """Compile (or load) both kernels: with and without the lookup of many sequences."""
        counts = (1,) if max_sequences <= _LOOKUP_SEQUENCES else (1, _LOOKUP_SEQUENCES + 1)
        try:
            for sequences in counts:
                self._run_once(sequences)
        except Exception as error:  # a compiler raises kinds of its own
            raise StartupError(f"attention backend {self.name} does not run: {error}") from error

    def _run_once(self, sequences: int) -> None:
        spec = self._spec
        cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32, device=spec.device)
        batch = Batch(cu_seqlens[1:], cu_seqlens[1:], cu_seqlens, (1,) * sequences, 1)
        self.plan(batch).run(*zero_qkv(spec, sequences), 0)
        torch.cuda.synchronize(spec.device)

    def _load(self) -> Any:
        if self._attend is None:
            self._attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        return self._attend
