"""Ids back into text as they come: never half a character, and in the end what the library says of all of them."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from rose.gateway.detokenize import REPLACEMENT, TokenTexts
from tests.conftest import pulled
from tests.support import tiny_tokenizers

TEXTS = (
    "The river meets the sea.",
    "猫在窗台上睡着了。",
    "👨‍👩‍👧‍👦 and 🏳️‍🌈, e\u0301 and \u0ce8",
    "  leading,  double and trailing  ",
    "\n\tΣ\u200d\ufeff x",
)


@functools.cache
def byte_level() -> Tokenizer:
    return tiny_tokenizers.byte_level(chat=True)


@functools.cache
def sentence_pieces() -> Tokenizer:
    """Llama-2's: pieces with ▁ for a blank, one put before the text, bytes for what the pieces lack."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁river", "the", "river", "s", "e", "a", "r", "t", "h", "i", "v", ",", ".", "T"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "the"), ("▁", "river")]
    merges += [("t", "h"), ("th", "e"), ("r", "i"), ("ri", "v"), ("riv", "e"), ("rive", "r")]
    vocabulary |= {piece: len(vocabulary) + i for i, piece in enumerate(["th", "ri", "riv", "rive"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer.from_str(sentence_pieces().to_str())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


KINDS = {"byte_level": byte_level, "sentence_pieces": sentence_pieces, "metaspace": metaspace}


@pytest.fixture(params=sorted(KINDS))
def tokenizer(request) -> Tokenizer:
    return KINDS[request.param]()


def pieces_of(tokenizer, ids):
    stream = TokenTexts(tokenizer).stream()
    return [*(stream.add(number) for number in ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_whole_and_never_half_a_character(tokenizer, text):
    """Report C30: emoji and CJK over several tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("text", [*TEXTS, "the river the river", "the  river", "the river, the sea."])
def test_a_text_goes_on_where_its_prompt_ended(tokenizer, text):
    """Prompt and answer together are the text of all tokens: the first word of an answer keeps its blank."""
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut])
        if REPLACEMENT in before:
            continue
        stream = texts.stream(ids[:cut])
        after = [*(stream.add(number) for number in ids[cut:]), stream.finish()]
        assert before + "".join(after) == tokenizer.decode(ids), cut


def test_special_tokens_are_no_past():
    tokenizer = sentence_pieces()
    the, begin = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("<s>")
    texts = TokenTexts(tokenizer)
    assert texts.stream([begin]).add(the) == "the"
    assert texts.stream([the, begin]).add(the) == " the"
    half = tokenizer.token_to_id("<0xE7>")
    assert texts.stream([the, half]).add(the) == "the"


def test_text_is_given_out_as_soon_as_it_is_certain():
    tokenizer = byte_level()
    ids = tokenizer.encode("a猫b", add_special_tokens=False).ids
    assert len(ids) == 5
    assert pieces_of(tokenizer, ids) == ["a", "", "", "猫", "b", ""]


@given(st.lists(st.integers(0, 470), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_bytes_at_all_are_what_the_library_makes_of_them(ids):
    """A model that draws at random writes broken UTF-8; ids past the vocabulary are no text."""
    tokenizer = byte_level()
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [sentence_pieces, metaspace])
def test_random_pieces_between_whole_characters(make):
    """Bytes that are no character are another matter there: the library unsays characters before them."""
    tokenizer = make()
    draw = random.Random(5)
    for _ in range(200):
        text = "".join(draw.choice(["the", " ", "river", "猫", "é", ",", "🦜", "s", "  "]) for _ in range(12))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_what_is_left_is_given_out_at_the_end():
    tokenizer = byte_level()
    ids = tokenizer.encode("猫", add_special_tokens=False).ids[:2]
    assert pieces_of(tokenizer, ids) == ["", "", REPLACEMENT]
    assert tokenizer.decode(ids) == REPLACEMENT


def test_an_endless_run_of_broken_bytes_is_not_held_for_ever():
    tokenizer = sentence_pieces()
    stream = TokenTexts(tokenizer).stream()
    broken = tokenizer.token_to_id("<0xE7>")
    assert "".join(stream.add(broken) for _ in range(64)).count(REPLACEMENT) >= 48


def test_special_tokens_have_no_text_and_added_ones_have():
    tokenizer = byte_level()
    end, think = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<think>"))
    a = tokenizer.encode("a", add_special_tokens=False).ids
    assert "".join(pieces_of(tokenizer, [*a, end, think, *a])) == "a<think>a"


def test_bytes_of_single_tokens():
    texts = TokenTexts(byte_level())
    ids = byte_level().encode(" 猫the", add_special_tokens=False).ids
    assert b"".join(map(texts.bytes_of, ids)) == " 猫the".encode()
    assert texts.bytes_of(ids[1]) == "猫".encode()[:1]
    assert texts.bytes_of(byte_level().token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert texts.bytes_of(100_000) == b""
    texts = TokenTexts(sentence_pieces())
    assert texts.bytes_of(sentence_pieces().token_to_id("▁the")) == b" the"
    assert texts.bytes_of(sentence_pieces().token_to_id("<0xE7>")) == b"\xe7"


@pytest.mark.weights
def test_real_tokenizers_against_the_library():
    """Byte-level ones, and XLM-RoBERTa's for a tokenizer of another kind."""
    for name in ("smollm2", "qwen3", "qwen3.5", "xlm-roberta"):
        tokenizer = Tokenizer.from_file(str(pulled(name) / "tokenizer.json"))
        for text in (*TEXTS, *tiny_tokenizers.CORPUS):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            pieces = pieces_of(tokenizer, ids)
            assert "".join(pieces) == tokenizer.decode(ids), (name, text)
