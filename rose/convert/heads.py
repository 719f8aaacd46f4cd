"""The weights of heads that are not part of the backbone's names: BGE-M3's files, and yes and no of a language model.

Knows names, shapes and files; knows nothing of serving.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rose.config import ModelFolder, RerankerConfig
from rose.convert.checkpoint import Checkpoint
from rose.convert.rules import Family, Rename
from rose.errors import CheckpointError

# A head's own file holds the two tensors of one linear layer.
LINEAR = Family(anchor="weight", prefixes=("", "linear."))
_MATRIX = "lm_head.weight"
# A language model's head, for those that run it.
LM_HEAD = (Rename(_MATRIX, "weight"),)


def colbert_width(folder: ModelFolder) -> int | None:
    """Rows of the ColBERT matrix, from its file's header; None where there is no file, or no matrix in it."""
    for head in folder.token_heads:
        if head.name == "colbert" and head.unavailable is None:
            with Checkpoint(folder.path / head.file) as checkpoint:
                shapes = [entry.shape for name, entry in checkpoint.entries.items() if name.endswith("weight")]
            return shapes[0][0] if shapes and len(shapes[0]) == 2 else None
    return None


def yes_no_row(checkpoint: Checkpoint, prefix: str, config: RerankerConfig, *, tied: bool, path: Path) -> Tensor:
    """The head's row for yes minus that for no, in fp32 (or that for yes alone): [1, D].

    Exact: the product with this row is the difference of the two logits, and no other logit is ever computed.

    Args:
        prefix: of the backbone's names.
        tied: tie_word_embeddings of the config: the embedding is the head's matrix.

    Raises:
        CheckpointError: no matrix, an id past its rows, or a tied pair of two different matrices.
    """
    embedding, heads = _matrices(checkpoint, prefix)
    if not heads and not tied:
        raise CheckpointError(
            f"{path} lacks {_MATRIX}, of which the score is made, and tie_word_embeddings is false, so that the "
            "embedding cannot stand for it; it cannot rerank"
        )
    ids = [config.yes_id, config.no_id]
    rows = [_row(checkpoint, (heads or [embedding])[0], i) for i in ids if i is not None]
    if tied and heads and embedding in checkpoint.entries:
        own = [_row(checkpoint, embedding, i) for i in ids if i is not None]
        if not all(torch.equal(a, b) for a, b in zip(rows, own, strict=True)):
            raise _differ(heads[0], embedding)
    return (rows[0] - rows[1] if len(rows) == 2 else rows[0])[None]


def check_tied(checkpoint: Checkpoint, prefix: str) -> None:
    """Whether a head that is in the file beside the embedding it is tied to is the same matrix.

    Args:
        prefix: of the backbone's names.

    Raises:
        CheckpointError: it is another one: either the config is wrong or the file is, and which cannot be told.
    """
    embedding, heads = _matrices(checkpoint, prefix)
    if embedding not in checkpoint.entries:
        return
    for head in heads:
        one, other = checkpoint.read(head), checkpoint.read(embedding)
        if one.shape != other.shape or one.dtype != other.dtype or not torch.equal(one, other):
            raise _differ(head, embedding)


def _matrices(checkpoint: Checkpoint, prefix: str) -> tuple[str, list[str]]:
    """(the embedding's name, names under which the head is in the file)."""
    heads = [name for name in dict.fromkeys((_MATRIX, prefix + _MATRIX)) if name in checkpoint.entries]
    return f"{prefix}embed_tokens.weight", heads


def _differ(head: str, embedding: str) -> CheckpointError:
    return CheckpointError(
        f"{head} and {embedding} differ, and tie_word_embeddings of config.json says that they are one"
    )


def _row(checkpoint: Checkpoint, name: str, index: int) -> Tensor:
    entry = checkpoint.entries[name]
    if len(entry.shape) != 2 or index >= entry.shape[0]:
        raise CheckpointError(f"{name} in {entry.file} has shape {entry.shape}, and no row {index}")
    return checkpoint.read_row(name, index).float()
