"""A causal language model run in both directions by transformers, pooled and normalised as ROSE serves it.

Knows the model; knows neither data nor losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.attention_backends import load_backend
from rose.batch import Batch
from rose.config import read_model_folder
from rose.convert import load_model


def load_bidirectional(folder: Path) -> Any:
    """The backbone in fp32 without its causal mask (transformers >= 5.2 builds its mask by `is_causal`)."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.is_causal = False
    # torch's fused attention takes as long as all else together in a backward of short texts in bf16 on a CPU.
    settings = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    return AutoModel.from_pretrained(folder, config=config, **settings).eval()


def embed(model: Any, sequences: Sequence[Sequence[int]], chunk_tokens: int = 1024) -> Tensor:
    """-> [len(sequences), D], unit vectors. Sequences run in chunks of similar length, so that little is padding."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    chunks = _chunks(order, sequences, chunk_tokens)
    rows = torch.cat([_embed_chunk(model, [sequences[i] for i in own]) for own in chunks])
    return rows[torch.tensor(order).argsort()]


def _chunks(order: Sequence[int], sequences: Sequence[Sequence[int]], limit: int) -> Iterator[list[int]]:
    """Neighbours by length, `limit` padded tokens at most, one sequence at least."""
    own: list[int] = []
    for i in order:  # ascending, so that the newest is the longest
        if own and (len(own) + 1) * len(sequences[i]) > limit:
            yield own
            own = []
        own.append(i)
    yield own


def _embed_chunk(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, sequences))
    ids = torch.tensor([[*own, *[0] * (longest - len(own))] for own in sequences])
    mask = torch.arange(longest) < torch.tensor([[len(own)] for own in sequences])
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
        hidden = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
    mean = (hidden.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1)


@torch.inference_mode()
def difference_from_rose(model: Any, served: Path, sequences: Sequence[Sequence[int]]) -> float:
    """The largest difference of a component between `embed` and ROSE's forward of a converted folder.

    Both are asked with padding (all sequences at once) and without (one by one): masks are built differently there.
    """
    rose = load_model(read_model_folder(served), "cpu", torch.float32)
    batch = Batch.pack([list(own) for own in sequences])
    batch.attention = load_backend("torch_sdpa", rose.attention_spec(torch.device("cpu"), torch.float32)).plan(batch)
    expected = rose(batch, [rose.default_output])[rose.default_output]
    alone = torch.cat([embed(model, [own]) for own in sequences])
    return max(float((found - expected).abs().max()) for found in (embed(model, sequences), alone))
