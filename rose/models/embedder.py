"""An embedder: any backbone with a sentence head behind it, and heads over token rows where the checkpoint has them.

The pooled outputs are forms of the sentence head's one vector. Knows how a folder describes the heads; does not know
which backbone it composes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.config import ModelFolder
from rose.errors import CheckpointError, Unsupported
from rose.kernels.pool import Finish, finish
from rose.layers.sentence_head import DenseHead, SentenceHead
from rose.layers.token_head import ColbertHead, LexicalHead
from rose.models.base import OutputSpec, attention_spec, check_outputs
from rose.models.registry import build_backbone, find_entry

# Integer forms by name, made from the vector as it leaves the head: rose.kernels.pool.finish.
_QUANTISED: dict[str, Finish] = {"int8": "tanh_int8", "binary": "sign_bits"}
_OF_TOKENS = ("sparse", "colbert")


class Embedder(nn.Module):
    """A rose.models.base.ServedModel.

    Outputs: "dense", fp32; where the folder names a quantiser, "int8" and "binary" (packed sign bits); for BGE-M3
    "sparse" (lexical weights) and "colbert" (a vector a token).

    Attributes:
        spans_unavailable: why a batch may not have spans, or None where it may.
    """

    def __init__(
        self,
        folder: ModelFolder,
        backbone: nn.Module,
        head: SentenceHead,
        lexical: LexicalHead | None = None,
        colbert: ColbertHead | None = None,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.backbone = backbone
        self.head = head
        self.lexical = lexical
        self.colbert = colbert
        width = 0 if colbert is None else colbert.linear.weight.shape[0]
        self.outputs: Mapping[str, OutputSpec] = describe_outputs(folder) | _token_outputs(folder, width)
        self.default_output = "dense"
        self.vocab_size = folder.architecture.vocab_size
        self.num_layers = folder.architecture.num_layers
        self.spans_unavailable = head.spans_unavailable

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
        """What every layer of the backbone asks of attention."""
        return attention_spec(self.folder, device, dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """name -> [B, dimension] ([S, dimension] for a batch with spans), or [T, dimension] where the output is of
        tokens, for each name of `outputs`. Only the heads that are asked for run.

        Raises:
            Unsupported: a name that `self.outputs` does not have to give, or spans where `spans_unavailable`.
        """
        check_outputs(self.outputs, outputs)
        if batch.spans is not None and self.spans_unavailable is not None:
            raise Unsupported(self.spans_unavailable, param="spans")
        hidden = self.backbone(batch)
        results: dict[str, Tensor] = {}
        forms = [name for name in outputs if name not in _OF_TOKENS]
        if forms:
            vectors = self.head(hidden, batch.cu_seqlens, batch.spans)
            results = {n: finish(vectors, _QUANTISED[n]) if n in _QUANTISED else vectors for n in forms}
        if len(forms) < len(outputs):
            rows = hidden.float()
            if self.lexical is not None and "sparse" in outputs:
                results["sparse"] = self.lexical(rows, batch.ids)
            if self.colbert is not None and "colbert" in outputs:
                results["colbert"] = self.colbert(rows)
        return results


def describe_outputs(folder: ModelFolder) -> dict[str, OutputSpec]:
    """The forms of the one vector that an embedder of this folder can give."""
    size = folder.dimension
    outputs = {"dense": OutputSpec(dtype="float32", dimension=size, normalized=folder.normalize)}
    if folder.quantizer is not None:
        uneven = None if size % 8 == 0 else f"{size} dimensions do not fill whole bytes"
        outputs["int8"] = OutputSpec(dtype="int8", dimension=size)
        outputs["binary"] = OutputSpec(dtype="uint8", dimension=size // 8, unavailable=uneven)
    return outputs


def _token_outputs(folder: ModelFolder, colbert_width: int) -> dict[str, OutputSpec]:
    """Both heads of a BGE-M3 folder, with the reason where one is missing."""
    specs = {
        "sparse": OutputSpec(dtype="float32", dimension=1, per_token=True, kind="weights"),
        # <s> has a row in the model's answer, and none in the served one: its vector is the dense one's business.
        "colbert": OutputSpec(
            dtype="float32",
            dimension=colbert_width or folder.architecture.hidden_size,
            per_token=True,
            normalized=True,
            skip_tokens=1,
        ),
    }
    return {head.name: replace(specs[head.name], unavailable=head.unavailable) for head in folder.token_heads}


def build_embedder(folder: ModelFolder, colbert_width: int | None = None) -> Embedder:
    """With uninitialised weights, on torch's default device.

    Args:
        colbert_width: rows of the ColBERT head's matrix, which no config states; None means hidden_size.

    Raises:
        CheckpointError: an architecture that is not served, or a head that is not.
    """
    pooling = folder.pooling
    if pooling is None:
        raise CheckpointError(f"{folder.path} states no pooling, and an embedder needs one")
    if pooling.excludes_prompt and any(folder.prompts.values()) and pooling.modes != ("mean",):
        raise CheckpointError(
            f"{pooling.source}: include_prompt is false, which is served for mean and last, and not for "
            f"{' + '.join(pooling.modes)}"
        )
    served = find_entry(folder.architecture).architectures
    if folder.architecture.architecture not in served:
        name = folder.architecture.architecture
        raise CheckpointError(f"architecture {name!r} is not served as an embedder; there are {', '.join(served)}")
    dense = [
        DenseHead(
            module.in_features,
            module.out_features,
            bias=module.bias,
            activation=module.activation,
            residual=module.residual,
        )
        for module in folder.dense
    ]
    head = SentenceHead(pooling.modes, dense, normalize=folder.normalize, keep=folder.truncate_dim)
    width = folder.architecture.hidden_size
    heads = {config.name: config for config in folder.token_heads if config.unavailable is None}
    lexical = LexicalHead(width, heads["sparse"].unweighted_ids) if "sparse" in heads else None
    colbert = ColbertHead(width, colbert_width or width) if "colbert" in heads else None
    return Embedder(folder, build_backbone(folder.architecture), head, lexical, colbert)
