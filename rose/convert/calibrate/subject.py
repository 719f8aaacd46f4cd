"""The model that is calibrated, in fp32, and what it answers to some token ids.

An embedder answers with vectors, a reranker with scores, a language model with what each token cost it. Plain torch
attention, so that no kernel of ours is trusted by both sides. Knows models; what counts as near is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rose.attention_backends import load_backend
from rose.batch import AttentionPlan, Batch
from rose.config import ModelFolder
from rose.convert.load import load_generative, load_model
from rose.errors import CheckpointError
from rose.models.base import ServedModel
from rose.models.causal_lm import CausalLM

Array = NDArray[np.float64]
_TOKENS = 4096  # of one batch


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether answers are near enough, and by which measures."""

    passed: bool
    measures: Mapping[str, float]


Judge = Callable[[Array, Array], Verdict]


@dataclass(slots=True)
class Subject:
    """
    Attributes:
        kind: "vectors" [texts, D], "scores" [pairs, labels], or "tokens": [tokens, 2] what a token cost in nats, and
            the likeliest id in its place.
        ids, types: of the texts (or pairs), and their token types where the model has more than one.
        wrap_attention: what stands around each batch's attention; None: nothing.
    """

    folder: ModelFolder
    kind: Literal["vectors", "scores", "tokens"]
    model: nn.Module
    device: torch.device
    ids: Sequence[Sequence[int]]
    types: Sequence[Sequence[int]] | None = None
    dtype: torch.dtype = torch.float32
    wrap_attention: Callable[[AttentionPlan], AttentionPlan] | None = None

    @property
    def backbone(self) -> nn.Module:
        return cast(nn.Module, self.model.backbone)

    def answers(self, which: Sequence[int]) -> Array:
        """To the texts of these indices, in their order."""
        return np.concatenate([self._answer(batch) for batch in self._batches(which)])

    def _batches(self, which: Sequence[int]) -> Iterator[Batch]:
        held: list[int] = []
        for index in (*which, None):
            tokens = sum(len(self.ids[i]) for i in held)
            if held and (index is None or tokens + len(self.ids[index]) > _TOKENS):
                yield self._pack(held)
                held = []
            if index is not None:
                held.append(index)

    def _pack(self, which: Sequence[int]) -> Batch:
        batch = Batch.pack([list(self.ids[i]) for i in which], self.device)
        if self.types is not None:
            flat = [kind for i in which for kind in self.types[i]]
            batch.type_ids = torch.tensor(flat, dtype=torch.int32, device=self.device)
        model = cast("ServedModel | CausalLM", self.model)
        spec = replace(model.attention_spec(self.device, self.dtype), layout="ragged")
        plan = load_backend("torch_sdpa", spec).plan(batch)
        batch.attention = plan if self.wrap_attention is None else self.wrap_attention(plan)
        return batch

    def _answer(self, batch: Batch) -> Array:
        if self.kind == "tokens":
            return self._costs(batch)
        model = cast(ServedModel, self.model)
        found: Array = model(batch, [model.default_output])[model.default_output].double().cpu().numpy()
        return found

    @torch.inference_mode()
    def _costs(self, batch: Batch) -> Array:
        model = cast(CausalLM, self.model)
        hidden: Tensor = model.backbone(batch)
        costs: list[Tensor] = []
        # The last token of a text has no next one. 512 rows of 150,000 logits in fp32 are 300 MB.
        for row in torch.cat([torch.arange(a, b - 1) for a, b in _spans(batch.lengths)]).to(self.device).split(512):
            logits: Tensor = model.lm_head(hidden[row])
            cost = torch.nn.functional.cross_entropy(logits, batch.ids[row + 1].long(), reduction="none")
            costs.append(torch.stack([cost.double(), logits.argmax(-1).double()], dim=1))
        found: Array = torch.cat(costs).cpu().numpy()
        return found


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for length in lengths:
        yield at, at + length
        at += length


def open_subject(
    folder: ModelFolder,
    ids: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Subject:
    """Load a folder.

    Raises:
        CheckpointError: as `load_model`, or a folder that embeds chunks of documents.
    """
    if folder.contextual:
        raise CheckpointError(f"{folder.path} embeds chunks of documents, which is not calibrated here")
    at = torch.device(device)
    model: nn.Module
    if folder.generation is not None:
        model, kind = load_generative(folder, at, dtype), "tokens"
    else:
        model = cast(nn.Module, load_model(folder, at, dtype))
        kind = "vectors" if folder.reranker is None else "scores"
    return Subject(folder, cast("Literal['vectors', 'scores', 'tokens']", kind), model, at, ids, types, dtype)


def damage(kind: str, plain: Array, other: Array) -> float:
    """How far answers moved, in one number: 1 - mean cosine, mean difference of scores, or of nats a token."""
    if kind == "vectors":
        lengths = np.linalg.norm(plain, axis=1) * np.linalg.norm(other, axis=1)
        return float(1 - ((plain * other).sum(1) / lengths).mean())
    if kind == "scores":
        return float(np.abs(plain - other).mean())
    return float(np.abs(plain[:, 0] - other[:, 0]).mean())
