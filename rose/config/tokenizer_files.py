"""Which ids a folder's special tokens have, read from the tokenizer's files without a tokenizer.

Knows tokenizer.json, tokenizer_config.json and special_tokens_map.json; turns no text into ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from rose.config.json_file import JsonFile


class TokenizerFiles:
    """The tokenizer's files of one folder; each is read when first asked for, and any may be missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text_of(self, role: str) -> str | None:
        """The token that has a role ("sep", "cls", "pad", ...), or None where no file states one."""
        for file in (self.config, self._special_tokens):
            value = file.data.get(f"{role}_token")
            if isinstance(value, dict):  # an AddedToken with its flags
                value = value.get("content")
            if isinstance(value, str) and value:
                return value
        return None

    def id_of(self, token: str | None) -> int | None:
        """The id of a token as the vocabulary spells it, or None where it has none."""
        if token is None:
            return None
        found = self._listed.get(token)  # a small file; the vocabulary may have megabytes
        return self._ids.get(token) if found is None else found

    def role_id(self, role: str) -> int | None:
        return self.id_of(self.text_of(role))

    @cached_property
    def config(self) -> JsonFile:
        return JsonFile.read_if_there(self.folder / "tokenizer_config.json")

    @cached_property
    def chat_template(self) -> str:
        """The folder's chat template, or nothing; a list of named ones counts by its default."""
        path = self.folder / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        stated = self.config.data.get("chat_template")
        if isinstance(stated, list):
            named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
            stated = named.get("default")
        return stated if isinstance(stated, str) else ""

    @cached_property
    def _special_tokens(self) -> JsonFile:
        return JsonFile.read_if_there(self.folder / "special_tokens_map.json")

    @cached_property
    def _listed(self) -> dict[str, int]:
        """Added tokens, where tokenizer_config.json lists them by id."""
        table = self.config.child("added_tokens_decoder")
        return {table.child(index).text("content"): int(index) for index in table.data if index.isdigit()}

    @cached_property
    def _ids(self) -> dict[str, int]:
        file = JsonFile.read_if_there(self.folder / "tokenizer.json")
        ids = dict(_vocabulary(file.child("model").data.get("vocab")))
        for entry in file.data.get("added_tokens") or ():
            ids[str(entry.get("content"))] = int(entry.get("id", -1))
        return ids


def _vocabulary(vocab: Any) -> Iterable[tuple[str, int]]:
    """BPE and WordPiece store a table, Unigram a list of [piece, score] in the order of the ids."""
    if isinstance(vocab, dict):
        return vocab.items()
    return ((str(piece), index) for index, (piece, _) in enumerate(vocab or ()))
