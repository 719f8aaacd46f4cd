"""A reranker: any backbone with a head behind it that scores the pair a sequence holds.

Knows which head a folder has; knows neither how pairs are written nor what is made of a raw score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.config import ModelFolder
from rose.errors import CheckpointError
from rose.layers.score_head import BertClassifier, LastTokenScore, RobertaClassifier
from rose.models.base import OutputSpec, attention_spec, check_outputs
from rose.models.registry import build_backbone, find_entry

_HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "bert": BertClassifier,
    "roberta": RobertaClassifier,
    "last": LastTokenScore,
}


class Reranker(nn.Module):
    """A rose.models.base.ServedModel with one output, "score": raw logits in fp32, one a label."""

    def __init__(self, folder: ModelFolder, backbone: nn.Module, head: nn.Module, labels: tuple[str, ...]) -> None:
        super().__init__()
        self.folder = folder
        self.backbone = backbone
        self.head = head
        self.outputs: Mapping[str, OutputSpec] = {
            "score": OutputSpec(dtype="float32", dimension=len(labels), kind="score", labels=labels)
        }
        self.default_output = "score"
        self.vocab_size = folder.architecture.vocab_size
        self.num_layers = folder.architecture.num_layers

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
        """What every layer of the backbone asks of attention."""
        return attention_spec(self.folder, device, dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """name -> [B, labels] for each name of `outputs`.

        Raises:
            Unsupported: a name that is not of `self.outputs`.
        """
        check_outputs(self.outputs, outputs)
        scores = cast(Tensor, self.head(self.backbone(batch), batch.cu_seqlens))
        return dict.fromkeys(outputs, scores)


def build_reranker(folder: ModelFolder) -> Reranker:
    """With uninitialised weights, on torch's default device.

    Raises:
        CheckpointError: a folder without a head that scores pairs, or an architecture that is not served.
    """
    config = folder.reranker
    if config is None:
        raise CheckpointError(f"{folder.path} has no head that scores a pair, so it cannot rerank")
    entry = find_entry(folder.architecture)
    kind = entry.classifier if config.head == "pooled" else "last"
    head = _HEADS[kind](folder.architecture.hidden_size, len(config.labels))
    return Reranker(folder, build_backbone(folder.architecture), head, config.labels)
