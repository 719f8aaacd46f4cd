"""What a folder is served as, and what says so.

Knows a folder as it was read; knows nothing of serving.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.config.folder import ModelFolder
from rose.config.reranker import Task


@dataclass(frozen=True, slots=True)
class ServedTask:
    """
    Attributes:
        reason: the file, flag or default that decided it, for the start-up print.
    """

    task: Task
    reason: str


def served_task(folder: ModelFolder) -> ServedTask:
    """What the folder was read as: pooling makes an embedder, a head that scores a reranker, and a language model's
    head with neither of them is for generating. `read_model_folder(path, task=...)` settles it otherwise."""
    if folder.generation is not None:
        return ServedTask("generate", folder.generation.source)
    if folder.reranker is not None:
        return ServedTask("rerank", folder.reranker.source)
    return ServedTask("embed", "no pooling" if folder.pooling is None else f"pooling of {folder.pooling.source}")
