"""Texts as the token ids that a folder's model is run on: what the front would send, made here without it.

Knows tokenizers and folders; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.config import ModelFolder
from rose.errors import CheckpointError, InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_QUERIES, _DOCUMENTS = 8, 32
_LANGUAGE_TOKENS = 512  # of a text whose tokens are counted one by one


@dataclass(frozen=True, slots=True)
class Tokens:
    """
    Attributes:
        ids: of each text, or of each pair.
        types: token types beside them, where the model has more than one.
        shape: of the answers: [texts, -1] or [queries, documents].
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    shape: tuple[int, int]


def tokens_of(
    folder: ModelFolder, texts: Sequence[str], prompt: str | None = None, *, longest: int | None = None
) -> Tokens:
    """
    Args:
        prompt: name of the one that an embedder's texts are put behind; None: the default one.
        longest: tokens of a text or pair, where that is less than the model's limit.

    Raises:
        CheckpointError: no tokenizer.json. InvalidInput: a text without tokens, by its number, or an unknown prompt.
    """
    limit = min(longest or folder.max_tokens, folder.max_tokens)
    if folder.generation is not None:
        ids = _plain(folder, texts, min(limit, longest or _LANGUAGE_TOKENS))
        found = Tokens(ids, None, (len(texts), -1))
    elif folder.reranker is not None:
        found = _pairs(folder, texts, limit)
    else:
        found = Tokens(_singles(folder, texts, prompt, limit), None, (len(texts), -1))
    least = 2 if folder.generation is not None else 1
    short = next((i for i, own in enumerate(found.ids) if len(own) < least), None)
    if short is not None:
        what = "no tokens" if least == 1 else "fewer than two tokens, and the next one is what is measured"
        named = f"text {short} has {what}: {texts[short]!r}" if folder.reranker is None else f"pair {short} has {what}"
        raise InvalidInput(f"{folder.path}: {named}")
    return found


def _plain(folder: ModelFolder, texts: Sequence[str], limit: int) -> list[list[int]]:
    tokenizer = _tokenizer(folder)
    tokenizer.enable_truncation(limit)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def _singles(folder: ModelFolder, texts: Sequence[str], prompt: str | None, limit: int) -> list[list[int]]:
    """Behind a prompt, cut at the limit."""
    tokenizer = _tokenizer(folder)
    tokenizer.enable_truncation(limit)
    name = prompt or folder.default_prompt_name
    if name and name not in folder.prompts:
        raise InvalidInput(f"{folder.path} has no prompt {name!r}; there are {', '.join(folder.prompts) or 'none'}")
    before = folder.prompts[name] if name else ""
    texts = [before + text for text in texts]
    if folder.do_lower_case:
        texts = [text.lower() for text in texts]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def _pairs(folder: ModelFolder, texts: Sequence[str], limit: int) -> Tokens:
    """The first texts against the first, long pairs cut at the end."""
    reranker, tokenizer = folder.reranker, _tokenizer(folder)
    assert reranker is not None
    queries, documents = texts[:_QUERIES], texts[:_DOCUMENTS]
    pairs = [(query, document) for query in queries for document in documents]
    shape = (len(queries), len(documents))
    if reranker.form == "pair":
        tokenizer.enable_truncation(limit)
        encodings = tokenizer.encode_batch(pairs)
        types = [e.type_ids for e in encodings] if folder.architecture.type_vocab_size > 1 else None
        return Tokens([e.ids for e in encodings], types, shape)
    prefix, suffix = (tokenizer.encode(t, add_special_tokens=False).ids for t in (reranker.prefix, reranker.suffix))
    room = limit - len(prefix) - len(suffix)
    bodies = [tokenizer.encode(reranker.body(*pair), add_special_tokens=False).ids[:room] for pair in pairs]
    return Tokens([[*prefix, *body, *suffix] for body in bodies], None, shape)


def _tokenizer(folder: ModelFolder) -> Tokenizer:
    from tokenizers import Tokenizer

    path = folder.backbone_path / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
