"""ROSE's own kernel for short sequences: one block holds all keys of a sequence, and takes part in dependent launch.

Nothing to plan: the grid comes from tokens and sequences, lengths are read on the device. Knows lengths; knows no
graphs and no weights.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionSpec
from rose.attention_backends.probe import IMPORT_ERRORS, device_reason, shape_reason
from rose.attention_backends.rows import row_offsets, zero_qkv
from rose.batch import AttentionPlan, Batch
from rose.errors import InternalError, StartupError

LONGEST = 256
HEAD_DIMS = (16, 32, 64, 128, 256)
# The kernel is compiled for each power of two of its bound; shorter blocks than 64 keys save nothing.
_BOUNDS = (64, 128, 256)


class TritonShortPlan:
    """One batch: its offsets on the device and the bound of its lengths."""

    capturable = True
    # A bucket is always full, dummies included, so `whole` is the same for all batches of a key too.
    fixed = True

    def __init__(self, spec: AttentionSpec, cu_seqlens: Tensor, bound: int, whole: bool, attend: Any) -> None:
        self._spec = spec
        self._cu_seqlens = cu_seqlens
        self._bound = bound
        self._whole = whole
        self._attend = attend

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        spec = self._spec
        out: Tensor = self._attend(q, k, v, self._cu_seqlens, self._bound, spec.causal, spec.scale, self._whole)
        return out


class TritonShort:
    name = "triton_short"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._attend: Any = None

    def supports(self, spec: AttentionSpec) -> str | None:
        reason = shape_reason(spec, HEAD_DIMS) or _length_reason(spec) or device_reason(spec, (8, 0))
        if reason is not None:
            return reason
        try:
            self._load()
            importlib.import_module("triton")
        except IMPORT_ERRORS as error:
            return f"its kernel cannot be imported: {error}"
        return None

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        whole = row_offsets(batch)[-1] == batch.num_tokens
        if batch.max_length > LONGEST:
            raise InternalError(
                f"{self.name} serves at most {LONGEST} tokens, this batch is bounded to {batch.max_length}"
            )
        bound = next(b for b in _BOUNDS if b >= batch.max_length)
        return TritonShortPlan(self._spec, batch.cu_seqlens, bound, whole, self._attend or self._load())

    def warm_up(self, max_sequences: int) -> None:
        """Compile (or load) what it distinguishes: the bound of length, blocks for few and many tokens, and the power
        of two of the sequences; the last for many tokens only, as a rare one compiles in its key's first plain run."""
        counts = [n for n in (32, 64, 128, 256, 512, 1024) if n < 2 * max_sequences]
        loads = [(16, 1), (512, 2), (1024, 4), *((1024, n) for n in counts)]
        try:
            for bound in _BOUNDS:
                for tokens, sequences in loads:
                    self._run_once(tokens, sequences, bound)
            torch.cuda.synchronize(self._spec.device)
        except Exception as error:  # a compiler raises kinds of its own
            raise StartupError(f"attention backend {self.name} does not run: {error}") from error

    def _run_once(self, tokens: int, sequences: int, bound: int) -> None:
        spec = self._spec
        cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32, device=spec.device)
        ids = torch.zeros(tokens, dtype=torch.int32, device=spec.device)
        plan = self.plan(Batch(ids, ids, cu_seqlens, (1,) * sequences, bound))
        plan.run(*zero_qkv(spec, tokens), 0)

    def _load(self) -> Any:
        if self._attend is None:
            self._attend = importlib.import_module("rose.kernels.short_attention").short_attention
        return self._attend


def _length_reason(spec: AttentionSpec) -> str | None:
    if spec.max_length is None or spec.max_length > LONGEST:
        longest = "of any length" if spec.max_length is None else f"up to {spec.max_length}"
        return f"serves sequences of at most {LONGEST} tokens, asked for {longest}"
    if spec.window is not None and spec.window < LONGEST - 1:
        return f"has no sliding window, asked for one of {spec.window}"
    return None
