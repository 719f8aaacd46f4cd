"""A byte-level BPE vocabulary as a tokenizer.json that the `tokenizers` library reads.

Written as plain JSON and not through that library, so that the same vocabulary is the same file, byte for byte, under
every release of it: engine and front compare its digest. Knows vocabularies; knows neither packages nor models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteBPE:
    """
    Attributes:
        pieces: by id, spelled with a letter for each byte, as GPT-2's are.
        merges: pairs, the first wins.
        special: added tokens that a decoder leaves out -> id.
        added: other added tokens -> id.
        splits: pre-tokenisers before the bytes become letters, as tokenizer.json writes them.
        nfc: texts are normalised to NFC.
        ignore_merges: a word that is a piece is that piece, whatever the merges would make of it.
    """

    pieces: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    special: Mapping[str, int]
    added: Mapping[str, int] = field(default_factory=dict)
    splits: Sequence[Mapping[str, Any]]
    nfc: bool = False
    ignore_merges: bool = False


def split_at(pattern: str) -> dict[str, Any]:
    """A pre-tokeniser that makes a word of each match of a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# Each digit by itself, then GPT-2's own words.
SMOLLM_SPLITS: tuple[Mapping[str, Any], ...] = (
    {"type": "Digits", "individual_digits": True},
    split_at(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
)


def tokenizer_json(vocabulary: ByteBPE) -> dict[str, Any]:
    """Split, write bytes as letters, merge; nothing is put before or behind a text."""
    tokens = [(index, text, True) for text, index in vocabulary.special.items()]
    tokens += [(index, text, False) for text, index in vocabulary.added.items()]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": text, **flags, "special": special} for index, text, special in sorted(tokens)
        ],
        "normalizer": {"type": "NFC"} if vocabulary.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*vocabulary.splits, _BYTE_LEVEL]},
        "post_processor": {**_BYTE_LEVEL, "trim_offsets": False},
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": vocabulary.ignore_merges,
            "vocab": dict(sorted(vocabulary.pieces.items(), key=lambda piece: piece[1])),
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }


def write_tokenizer_files(folder: Path, vocabulary: ByteBPE, **config: Any) -> None:
    """tokenizer.json, and tokenizer_config.json with `config` in it."""
    _write(folder / "tokenizer.json", tokenizer_json(vocabulary))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
