"""What is printed of a folder that pools the last token: which token that is. Knows the tokenizer's files."""

from __future__ import annotations

from rose.config.folder import ModelFolder
from rose.config.tokenizer_files import TokenizerFiles


def end_fact(folder: ModelFolder) -> list[tuple[str, str]]:
    """A line of the start-up table; none for other poolings."""
    if folder.pooling is None or "last" not in folder.pooling.modes:
        return []
    return [("end token", TokenizerFiles(folder.backbone_path).end_told(pools_last=True))]
