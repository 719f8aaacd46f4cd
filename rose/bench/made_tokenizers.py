"""A tokenizer of a family's kind and full vocabulary size, made on the spot from the words of pseudo_texts.py.

Of a trained one it has the algorithm, the size and the mix of whole and cut words, so that tokenising costs
about what it does in service. Knows the tokenizers library; knows neither weights nor clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from math import log
from pathlib import Path
from typing import Any

from rose.bench.pseudo_texts import CONSONANTS, SYLLABLES, VOWELS, common_words

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_tokenizer(folder: Path, config: Mapping[str, Any], *, append_end: bool = False) -> None:
    """tokenizer.json and tokenizer_config.json for a config.json.

    Args:
        append_end: put the end token behind every text, as models that pool the last token want it.
    """
    kind = config["model_type"]
    if kind == "bert":
        tokenizer = _word_piece(config["vocab_size"])
    elif kind == "xlm-roberta":
        tokenizer = _unigram(config["vocab_size"])
    else:
        end = config.get("eos_token_id")
        tokenizer = _byte_level(end if end is not None and end < config["vocab_size"] else config["vocab_size"] - 1)
        if append_end:
            _append(tokenizer, "<|endoftext|>")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")


def _unigram(size: int) -> Any:
    """XLM-RoBERTa's layout: the special tokens first, <mask> last, pieces that begin a word marked."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = _distinct(
        [*_LETTERS, "▁", *SYLLABLES], ("▁" + word for word in common_words(size)), size - len(special) - 1
    )
    scored = [(token, 0.0) for token in special]
    scored += [(piece, -4.0 - log(rank + 1.0)) for rank, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*special, "<mask>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def _word_piece(size: int) -> Any:
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = ["##" + piece for piece in (*_LETTERS, *SYLLABLES)]
    pieces = _distinct([*_LETTERS, *inner], common_words(size), size - len(special))
    vocabulary = {token: number for number, token in enumerate([*special, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def _byte_level(size: int) -> Any:
    """`size` entries: the bytes, then what merges make of them; the end token comes right behind."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = []
    for left, right in islice(_merges(), max(0, size - len(alphabet))):
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Letters to syllables, then words a syllable at a time, with and without the space before them."""
    for consonant in CONSONANTS:
        for vowel in VOWELS:
            yield consonant, vowel
    for syllable in SYLLABLES:
        yield "Ġ", syllable
    for start in SYLLABLES:
        for syllable in SYLLABLES:
            yield "Ġ" + start, syllable
    for start in SYLLABLES:
        for middle in SYLLABLES:
            for syllable in SYLLABLES:
                yield "Ġ" + start + middle, syllable


def _append(tokenizer: Any, token: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {token}", special_tokens=[(token, tokenizer.token_to_id(token))]
    )


def _distinct(first: list[str], rest: Iterator[str], size: int) -> list[str]:
    """The first, then of the rest those that are new, `size` in all."""
    found = dict.fromkeys(first[:size])
    for piece in rest:
        if len(found) >= size:
            break
        found[piece] = None
    return list(found)
