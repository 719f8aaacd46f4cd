"""Ids as the reference library gives them, never padded, cut with their special tokens kept, from many threads."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from rose.errors import CheckpointError, TokenizerMismatch
from rose.gateway.facts import read_facts
from rose.gateway.tokenizer import BRIEF_CHARS, TextTokenizer
from tests.support import tiny_tokenizers
from tests.support.tiny_checkpoints import tiny_xlm_roberta

KINDS = {
    "word_piece": (tiny_tokenizers.word_piece, {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}),
    "unigram": (tiny_tokenizers.unigram, {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}),
    "byte_level": (lambda: tiny_tokenizers.byte_level(append_end=True), {"eos_token": "<|endoftext|>"}),
    "no_special_tokens": (tiny_tokenizers.byte_level, {"eos_token": "<|endoftext|>"}),
}
TEXTS = (
    *("The river meets the sea.", " leading and trailing  ", "\n", "  x ", "\tTabs\r\nand lines\n", "ÀÉ naïve"),
    *("猫在窗台上睡着了。", "👩‍👩‍👧‍👦 family", "a\x00b", "5.2", "A2" * 200),
)
CONTROL = ("a</s>b", "[SEP]", "x [CLS] y [MASK]", "<|im_end|>", "<mask>", "<s>", "a<|endoftext|>b", "<pad>")


@pytest.fixture(params=list(KINDS))
def kind(request, tmp_path):
    """The tokenizer under test and the reference for the same file."""
    make, names = KINDS[request.param]
    tiny_tokenizers.save(make(), tmp_path)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **names)
    return TextTokenizer(tmp_path), reference


def reference_ids(reference, text, **options):
    return reference(text, add_special_tokens=True, **options)["input_ids"]


@pytest.mark.parametrize("text", [*TEXTS, *CONTROL])
def test_ids_are_the_reference_librarys(kind, text):
    """Reports C33 (vllm#11691, tokenizers#787) and C34 (infinity): control tokens and blanks as in the reference."""
    tokenizer, reference = kind
    assert tokenizer.encode([text])[0].tolist() == reference_ids(reference, text)


def test_control_tokens_can_be_had_as_ordinary_text(kind):
    """Report C33: for text from strangers, control tokens are spelled out."""
    tokenizer, reference = kind
    special = set(reference.all_special_ids)
    assert tokenizer.encode(["猫 salt"], split_special_tokens=True)[0].tolist() == reference_ids(reference, "猫 salt")
    for text, name in (("a</s>b", "</s>"), ("[SEP]", "[SEP]"), ("a<|endoftext|>b", "<|endoftext|>")):
        if name not in reference.all_special_tokens:
            continue
        plain = tokenizer.encode([text])[0].tolist()
        split = tokenizer.encode([text], split_special_tokens=True)[0].tolist()
        added = sum(i in special for i in tokenizer.encode(["a"])[0].tolist())
        assert sum(i in special for i in plain) == added + 1
        assert sum(i in special for i in split) == added
        assert tokenizer.encode([text])[0].tolist() == plain  # the option left nothing behind


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path):
    """Files of published models pad or cut every text to a fixed length."""
    made = tiny_tokenizers.word_piece()
    made.enable_padding(length=128)
    made.enable_truncation(8)
    tiny_tokenizers.save(made, tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    short, long = tokenizer.encode(["a", "salt " * 40])
    assert len(short) == 3
    assert len(long) > 40


@pytest.mark.parametrize("text", ["猫" * 60, "👩‍👩‍👧‍👦" * 12, "salt flour " * 30])
def test_a_cut_text_keeps_its_special_tokens_at_every_length(kind, text):
    """Reports C30 (cuts inside characters) and C44 (vllm#22635): as the reference cuts, for every length."""
    tokenizer, reference = kind
    (ids,) = tokenizer.encode([text])
    for limit in range(tokenizer.special_tokens + 1, min(len(ids), 40) + 2):
        cut = tokenizer.cut(ids, limit).tolist()
        assert cut == reference_ids(reference, text, truncation=True, max_length=limit)
        assert len(cut) <= limit


def test_given_ids_without_special_tokens_are_cut_plainly(kind):
    tokenizer, _ = kind
    ids = np.arange(10, 30, dtype=np.int32)
    assert tokenizer.cut(ids, 5).tolist() == [10, 11, 12, 13, 14]
    assert tokenizer.cut(ids, 20) is ids


def test_threads_with_different_limits_do_not_meet(kind):
    """Report C145 (tokenizers#537, "already borrowed"): sixteen threads, each with a limit and texts of its own."""
    tokenizer, reference = kind

    def work(number):
        limit, split = 4 + number, number % 2 == 1
        texts = [f"{word} {number} " * (number + 1) for word in ("salt", "ferry", "猫", "tormenta")]
        encode = functools.partial(tokenizer.encode, texts, split_special_tokens=split)
        return [[tokenizer.cut(ids, limit).tolist() for ids in encode()] for _ in range(20)]

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    for number, rounds in enumerate(results):
        texts = [f"{word} {number} " * (number + 1) for word in ("salt", "ferry", "猫", "tormenta")]
        expected = [reference_ids(reference, text, truncation=True, max_length=4 + number) for text in texts]
        assert all(found == expected for found in rounds)


def test_short_texts_are_encoded_inline_and_long_ones_in_the_pool(tmp_path):
    tiny_tokenizers.save(tiny_tokenizers.word_piece(), tmp_path)
    tokenizer = TextTokenizer(tmp_path, threads=1, inline_chars=10)
    depths = []

    async def both(texts):
        work = asyncio.ensure_future(tokenizer.encode_async(texts))
        await asyncio.sleep(0)
        depths.append(tokenizer.pool_depth)
        return await work

    for texts in (["0123456789"], ["01234", "567890"]):
        found = asyncio.run(both(texts))
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in tokenizer.encode(texts)]
    assert depths == [0, 1]
    assert tokenizer.pool_depth == 0
    tokenizer.close()


def test_in_a_crowd_only_the_shortest_are_encoded_inline(tmp_path):
    """And what would be inline alone is never refused: it leaves half of the pool's places to longer texts."""
    tiny_tokenizers.save(tiny_tokenizers.word_piece(), tmp_path)
    crowd, held = [True], threading.Event()
    tokenizer = TextTokenizer(tmp_path, threads=1, queue=4, crowded=lambda: crowd[0])
    brief, middling, inline = "salt " * (BRIEF_CHARS // 5), "salt " * 200, []

    async def where(text):
        """Whether the text was encoded before the event loop got to anything else."""
        work = asyncio.ensure_future(tokenizer.encode_async([text]))
        await asyncio.sleep(0)
        inline.append(work.done())
        return work

    async def go():
        blocked = asyncio.ensure_future(tokenizer.in_pool(held.wait, 10**6))
        await asyncio.sleep(0)
        works = [await where(text) for text in (brief, middling, middling)]
        crowd[0] = False
        works.append(await where(middling))
        held.set()
        await asyncio.gather(blocked, *works)
        return [(await work)[0].tolist() for work in works]

    found = asyncio.run(go())
    assert inline == [True, False, True, True]
    assert found == [tokenizer.encode([text])[0].tolist() for text in (brief, middling, middling, middling)]
    tokenizer.close()


def test_order_is_kept_over_many_chunks(tmp_path):
    tiny_tokenizers.save(tiny_tokenizers.word_piece(), tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    texts = ["salt " * (1 + i % 7) + str(i) for i in range(150)]
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == [tokenizer.encode([text])[0].tolist() for text in texts]


def test_digest_and_mismatch(tmp_path):
    tiny_tokenizers.save(tiny_tokenizers.word_piece(), tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).digest()
    assert tokenizer.sha256 == digest
    tokenizer.check_same(digest, "there")
    for other in (b"", hashlib.sha256(b"other").digest()):
        with pytest.raises(TokenizerMismatch, match="the tokenizer of there"):
            tokenizer.check_same(other, "there")


@pytest.mark.parametrize("content", [None, "", "{}", '{"version": "1.0", "model": {"type": "Nope"}}'])
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFKC(), normalizers.Sequence([normalizers.Lowercase()])])
def test_lower_case_is_that_of_sentence_transformers(tmp_path, normalizer):
    """A cased tokenizer in a folder that says do_lower_case: ids as the reference library gives them."""
    from sentence_transformers import SentenceTransformer

    folder = tiny_xlm_roberta(tmp_path / "cased", max_seq_length=64)
    edit = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if normalizer is not None or edit.normalizer is not None:
        edit.normalizer = normalizer or normalizers.Sequence([])
        edit.save(str(folder / "tokenizer.json"))
    cased = front_tokenizer(folder)
    stated = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(stated | {"do_lower_case": True}))
    reference = SentenceTransformer(str(folder), device="cpu").tokenizer
    tokenizer = front_tokenizer(folder)
    texts = [*TEXTS, *CONTROL, "The RIVER Meets THE Sea", "ΟΔΟΣ ΑΣ", "İstanbul ÀÉ <S> A</s>B"]
    for text in texts:
        assert tokenizer.encode([text])[0].tolist() == reference_ids(reference, text), text
        split = tokenizer.encode([text], split_special_tokens=True)[0].tolist()
        assert split == cased.encode([text.lower()], split_special_tokens=True)[0].tolist() or "Σ" in text
    if not normalizer or "Lowercase" not in repr(normalizer):
        assert tokenizer.encode(["RIVER"])[0].tolist() != cased.encode(["RIVER"])[0].tolist()


def front_tokenizer(folder):
    facts = read_facts(folder)
    return TextTokenizer(facts.tokenizer_folder, lower_case=facts.lower_case)
