"""A source's weights, opened for planning and for one pass."""

from __future__ import annotations

from rose.convert.offline.source import Source
from rose.convert.offline.weights import FolderWeights


def open_weights(source: Source) -> FolderWeights:
    """
    Raises:
        CheckpointError: no weights, or damaged ones.
    """
    return FolderWeights(source.backbone)
