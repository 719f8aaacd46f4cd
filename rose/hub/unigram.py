"""The unigram vocabulary of XLM-RoBERTa as a tokenizer.json that the `tokenizers` library reads.

Written as plain JSON and not through that library, so that the same vocabulary is the same file, byte for byte, under
every release of it: engine and front compare its digest. Knows vocabularies; knows neither packages nor models.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import PullError
from rose.hub.gguf import Value

SPACE = "▁"
# Ids 0..3; what follows is ordinary pieces up to the mask.
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
VOCABULARY = 250_002
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Unigram:
    """Pieces with their log probabilities, by id, and the normaliser's table.

    Attributes:
        charsmap: SentencePiece's precompiled character map (nmt_nfkc), as bytes.
    """

    pieces: list[str]
    scores: list[float]
    charsmap: bytes


def read_unigram(metadata: dict[str, Value], size: int = VOCABULARY) -> Unigram:
    """The first `size` pieces of a GGUF vocabulary; the last of them is the mask.

    The file at hand pads the vocabulary to 250,048; XLM-RoBERTa's has 250,002.

    Raises:
        PullError: no unigram vocabulary, a shorter one, or one with other special pieces.
    """
    prefix = "tokenizer.ggml."
    wanting = [key for key in ("tokens", "scores", "precompiled_charsmap") if f"{prefix}{key}" not in metadata]
    if wanting:
        raise PullError(f"the GGUF file holds no unigram vocabulary: {prefix}{wanting[0]} is missing")
    pieces, scores = list(metadata[f"{prefix}tokens"][:size]), metadata[f"{prefix}scores"][:size]
    if len(pieces) != size or len(scores) != size:
        raise PullError(f"the vocabulary has {len(pieces)} pieces and {len(scores)} scores, expected {size}")
    if tuple(pieces[: len(SPECIAL)]) != SPECIAL:
        raise PullError(f"the vocabulary starts with {pieces[: len(SPECIAL)]}, expected {list(SPECIAL)}")
    pieces[-1] = MASK
    return Unigram(pieces, [*scores[:-1].tolist(), 0.0], metadata[f"{prefix}precompiled_charsmap"].tobytes())


def write_tokenizer_files(vocabulary: Unigram, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    _write(folder / "tokenizer.json", tokenizer_json(vocabulary))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>"}
    roles |= {"pad_token": "<pad>", "cls_token": "<s>", "mask_token": MASK}
    config = {"tokenizer_class": "XLMRobertaTokenizer", "model_max_length": MAX_TOKENS, **roles}
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "special_tokens_map.json", roles)


def tokenizer_json(vocabulary: Unigram) -> dict[str, Any]:
    """Normalise, split at white space, write spaces as `▁`, cut into pieces, put `<s>` and `</s>` around."""
    mask = len(vocabulary.pieces) - 1
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *(_special(index, piece, eats_space=False) for index, piece in enumerate(SPECIAL)),
            _special(mask, MASK, eats_space=True),
        ],
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(vocabulary.charsmap).decode(),
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
        "post_processor": _around(),
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": SPECIAL.index("<unk>"),
            "vocab": [list(pair) for pair in zip(vocabulary.pieces, vocabulary.scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _special(index: int, content: str, *, eats_space: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": eats_space, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **flags}


def _around() -> dict[str, Any]:
    def special(token: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def text(name: str, kind: int = 0) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    first = [special("<s>"), text("A"), special("</s>")]
    ids = {token: {"id": token, "ids": [SPECIAL.index(token)], "tokens": [token]} for token in ("<s>", "</s>")}
    pair = [*first, special("</s>"), text("B"), special("</s>")]
    return {"type": "TemplateProcessing", "single": first, "pair": pair, "special_tokens": ids}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
