"""What a front must know of the model beyond its card: how pairs and chats are written, what separates chunks.

Read from the same folder, with the same flags, as the engine reads it; a folder that holds a tokenizer and nothing else
serves embeddings only. Knows files; knows neither replicas nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.config.folder import read_model_folder
from rose.config.generation import GenerationConfig
from rose.config.reranker import RerankerConfig
from rose.gateway.chat_template import ChatTemplate, read_chat_template

# Keyword arguments of `read_model_folder` that settle what a folder leaves open.
Reading = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """
    Attributes:
        reranker: how pairs are written and what the score means; None for an embedder.
        token_types: whether the model tells the texts of a pair apart by token types.
        separator_id: the id between the chunks of a document; None for a model without late chunking.
        lower_case: texts are lower-cased before the tokenizer sees them.
        generation: how texts are continued; None for a model that continues none.
        chat: the chat template of one that does, if it has any.
        tokenizer_folder: where tokenizer.json lies.
    """

    tokenizer_folder: Path

    reranker: RerankerConfig | None = None
    token_types: bool = False
    separator_id: int | None = None
    lower_case: bool = False
    generation: GenerationConfig | None = None
    chat: ChatTemplate | None = None


def read_facts(folder: Path, reading: Reading | None = None) -> ModelFacts:
    """
    Args:
        reading: as the engines were given it.

    Raises:
        CheckpointError: a folder with a config.json that cannot be read, as the engine would say, or a generating model
            whose chat template cannot.
    """
    if not (folder / "config.json").exists() and not (folder / "modules.json").exists():
        return ModelFacts(folder)
    read = read_model_folder(folder, **(reading or {}))
    return ModelFacts(
        read.backbone_path,
        reranker=read.reranker,
        token_types=read.architecture.type_vocab_size > 1,
        separator_id=read.separator_id if read.contextual else None,
        lower_case=read.do_lower_case,
        generation=read.generation,
        chat=None if read.generation is None else read_chat_template(read.generation, read.backbone_path),
    )
