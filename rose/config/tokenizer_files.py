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

    @property
    def chat_template(self) -> str:
        """The folder's chat template, or nothing; a list of named ones counts by its default."""
        return self.chat_templates.get("default", "")

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Name -> chat template; "default" is the plain one. Files of their own win over tokenizer_config.json."""
        stated = self.config.data.get("chat_template")
        entries = stated if isinstance(stated, list) else [{"name": "default", "template": stated}]
        found = {str(e.get("name")): e.get("template") for e in entries if isinstance(e, dict)}
        paths = {"default": self.folder / "chat_template.jinja"}
        paths |= {path.stem: path for path in sorted((self.folder / "additional_chat_templates").glob("*.jinja"))}
        found |= {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
        return {name: template for name, template in found.items() if isinstance(template, str) and template}

    @property
    def size(self) -> int | None:
        """One more than the largest id in tokenizer.json, or None where there is none."""
        return max(self._ids.values(), default=-1) + 1 if self._ids else None

    @cached_property
    def first_added(self) -> str | None:
        """The special token that tokenizer.json itself puts before a single text, or None."""
        return _first_added(self._file.data.get("post_processor"))

    @cached_property
    def last_added(self) -> str | None:
        """The special token that tokenizer.json itself puts behind a single text, or None."""
        return _last_added(self._file.data.get("post_processor"))

    def end_told(self, *, pools_last: bool) -> str:
        """What stands behind every text, in words.

        tokenizer_config.json may promise a token (`add_eos_token`) that tokenizer.json, which runs, does not add.
        """
        if self.last_added is not None:
            return repr(self.last_added)
        promised = self.config.flag("add_eos_token", False)
        doubt = " (tokenizer_config.json: add_eos_token promises one, and it is not added)" if promised else ""
        pooled = "; the text's own last token is pooled" if pools_last else ""
        return f"none{pooled}{doubt}"

    @cached_property
    def _special_tokens(self) -> JsonFile:
        return JsonFile.read_if_there(self.folder / "special_tokens_map.json")

    @cached_property
    def _listed(self) -> dict[str, int]:
        """Added tokens, where tokenizer_config.json lists them by id."""
        table = self.config.child("added_tokens_decoder")
        return {table.child(index).text("content"): int(index) for index in table.data if index.isdigit()}

    @cached_property
    def _file(self) -> JsonFile:
        return JsonFile.read_if_there(self.folder / "tokenizer.json")

    @cached_property
    def _ids(self) -> dict[str, int]:
        file = self._file
        ids = dict(_vocabulary(file.child("model").data.get("vocab")))
        for entry in file.data.get("added_tokens") or ():
            ids[str(entry.get("content"))] = int(entry.get("id", -1))
        return ids


def _vocabulary(vocab: Any) -> Iterable[tuple[str, int]]:
    """BPE and WordPiece store a table, Unigram a list of [piece, score] in the order of the ids."""
    if isinstance(vocab, dict):
        return vocab.items()
    return ((str(piece), index) for index, (piece, _) in enumerate(vocab or ()))


def _first_added(processor: Any) -> str | None:
    if not isinstance(processor, dict):
        return None
    kind = processor.get("type")
    if kind == "Sequence":
        found = [_first_added(part) for part in processor.get("processors") or ()]
        return next((token for token in found if token is not None), None)
    if kind == "TemplateProcessing":
        first = (processor.get("single") or [{}])[0].get("SpecialToken")
        return None if first is None else str(first["id"])
    if kind in ("BertProcessing", "RobertaProcessing"):
        return str(processor["cls"][0])
    return None


def _last_added(processor: Any) -> str | None:
    if not isinstance(processor, dict):
        return None
    kind = processor.get("type")
    if kind == "Sequence":
        found = [_last_added(part) for part in processor.get("processors") or ()]
        return next((token for token in reversed(found) if token is not None), None)
    if kind == "TemplateProcessing":
        last = (processor.get("single") or [{}])[-1].get("SpecialToken")
        return None if last is None else str(last["id"])
    if kind in ("BertProcessing", "RobertaProcessing"):
        return str(processor["sep"][0])
    return None
