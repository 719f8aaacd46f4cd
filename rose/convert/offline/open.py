"""A source's weights, opened for planning and for one pass: the base's own, or with adapters merged into them."""

from __future__ import annotations

from rose.config.architecture import quantized_by, read_architecture
from rose.convert.families import FAMILIES
from rose.convert.offline.adapter import read_adapter
from rose.convert.offline.decide import Wishes
from rose.convert.offline.merge import MergedWeights
from rose.convert.offline.source import Source
from rose.convert.offline.weights import LETTERS, FolderWeights
from rose.errors import CheckpointError
from rose.models.registry import find_entry


def open_weights(source: Source, wishes: Wishes) -> FolderWeights:
    """
    Raises:
        CheckpointError: no weights, damaged or quantised ones, or an adapter that does not fit.
    """
    method = quantized_by(source.config)
    if method is not None:
        raise CheckpointError(
            f"{source.backbone} is quantised ({method}): convert the plain checkpoint, and calibrate what comes of it"
        )
    if not source.adapters:
        return FolderWeights(source.backbone)
    architecture = read_architecture(source.config, wishes.causal)
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in LETTERS}
    return MergedWeights(
        source.backbone,
        [read_adapter(path) for path in source.adapters],
        FAMILIES[find_entry(architecture).rules],
        dtype=None if wishes.dtype is None else by_name[wishes.dtype],
        tied=architecture.tie_word_embeddings,
        reads_head=wishes.to in ("reranker", "llm"),
    )
