"""An embedder: any backbone with a sentence head behind it. The outputs are forms of the head's one vector.

Knows how a folder describes the head; does not know which backbone it composes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.config import ModelFolder
from rose.errors import CheckpointError, Unsupported
from rose.kernels.pool import Finish, finish
from rose.layers.sentence_head import DenseHead, SentenceHead
from rose.models.base import OutputSpec
from rose.models.registry import build_backbone

# Integer forms by name, made from the vector as it leaves the head: rose.kernels.pool.finish.
_QUANTISED: dict[str, Finish] = {"int8": "tanh_int8", "binary": "sign_bits"}


class Embedder(nn.Module):
    """A rose.models.base.ServedModel.

    Outputs: "dense", fp32; and, where the folder names a quantiser, "int8" and "binary" (packed sign bits).
    """

    def __init__(self, folder: ModelFolder, backbone: nn.Module, head: SentenceHead) -> None:
        super().__init__()
        architecture = folder.architecture
        self.folder = folder
        self.backbone = backbone
        self.head = head
        self.outputs: Mapping[str, OutputSpec] = describe_outputs(folder)
        self.default_output = "dense"
        self.vocab_size = architecture.vocab_size
        self.num_layers = architecture.num_layers

    def attention_spec(self, device: torch.device, dtype: torch.dtype) -> AttentionSpec:
        """What every layer of the backbone asks of attention."""
        architecture = self.folder.architecture
        return AttentionSpec(
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            dtype=dtype,
            device=device,
            causal=architecture.causal,
            scale=architecture.head_dim**-0.5,
            max_length=self.folder.max_tokens,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """name -> [B, dimension] for each name of `outputs`.

        Raises:
            Unsupported: a name that is not of `self.outputs`.
        """
        for name in outputs:
            if name not in self.outputs:
                raise Unsupported(f"there is no output {name!r}; there are {', '.join(self.outputs)}", param="outputs")
        vectors = self.head(self.backbone(batch), batch.cu_seqlens)
        return {name: finish(vectors, _QUANTISED[name]) if name in _QUANTISED else vectors for name in outputs}


def describe_outputs(folder: ModelFolder) -> dict[str, OutputSpec]:
    """What an embedder of this folder can give."""
    size = folder.dimension
    outputs = {"dense": OutputSpec(dtype="float32", dimension=size, normalized=folder.normalize)}
    if folder.quantizer is not None:
        uneven = None if size % 8 == 0 else f"{size} dimensions do not fill whole bytes"
        outputs["int8"] = OutputSpec(dtype="int8", dimension=size)
        outputs["binary"] = OutputSpec(dtype="uint8", dimension=size // 8, unavailable=uneven)
    return outputs


def build_embedder(folder: ModelFolder) -> Embedder:
    """With uninitialised weights, on torch's default device.

    Raises:
        CheckpointError: an architecture that is not served, or a head that is not.
    """
    pooling = folder.pooling
    if pooling is None:
        raise CheckpointError(f"{folder.path} states no pooling, and an embedder needs one")
    if not pooling.include_prompt and any(folder.prompts.values()):
        raise CheckpointError(f"{pooling.source}: include_prompt is false, and pooling past a prompt is not served")
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
    head = SentenceHead(pooling.modes, dense, normalize=folder.normalize)
    return Embedder(folder, build_backbone(folder.architecture), head)
