"""What is read of long texts: prefixes with the whole text's ids, refusals by characters, a fair and bounded pool."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from rose.errors import InvalidInput, Overloaded
from rose.gateway.contextual import _of_document
from rose.gateway.text_bounds import LEAST_CHARS, MOST_CHARS, Bounds, groups, most_chars
from rose.gateway.tokenizer import TextTokenizer
from rose.gateway.tokenizer_pool import Piece, TokenizerPool
from tests.gateway.cards import reranker_card
from tests.gateway.conftest import MAX_TOKENS, card_for, live_front
from tests.gateway.processes import ports, running, wait_for
from tests.support import tiny_tokenizers
from tests.support.tiny_families import tiny_cross_encoder_bert, tiny_qwen3_reranker

KINDS = {
    "word_piece": tiny_tokenizers.word_piece,
    "unigram": tiny_tokenizers.unigram,
    "byte_level": lambda: tiny_tokenizers.byte_level(append_end=True),
}
LONG = {
    "prose": " ".join(itertools.islice(itertools.cycle(tiny_tokenizers.CORPUS), 1200)),
    "no blanks": "猫在窗台上睡着了。雨が上がったら散歩に行こう。" * 1500,
    "long words": ("abcdefghij" * 25 + " ") * 250,
    "one word": "salt" * 15_000,
    "control tokens": "a [SEP] b </s> c <|endoftext|> " * 2000,
    "blanks first": " \n" * 20_000 + "the river meets the sea " * 1000,
}


@pytest.fixture(params=list(KINDS))
def tokenizer(request, tmp_path):
    tiny_tokenizers.save(KINDS[request.param](), tmp_path)
    made = TextTokenizer(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", list(LONG))
def test_a_prefix_gives_the_ids_of_the_whole_text(tokenizer, name, split):
    text = LONG[name]
    (whole,) = tokenizer.encode([text], split_special_tokens=split)
    for limit in (tokenizer.special_tokens + 1, 17, 128, 512):
        bounds = Bounds(longest=512, cut_to=limit, cut_from=1)
        _, found = tokenizer.encode(["a", text], split_special_tokens=split, bounds=bounds)
        assert tokenizer.cut(found, limit).tolist() == tokenizer.cut(whole, limit).tolist()
        if len(whole) > 6000:
            assert len(found) < len(whole)


def test_a_text_whose_beginning_says_too_little_is_not_cut_to_something_else(tmp_path):
    tiny_tokenizers.save(tiny_tokenizers.word_piece(), tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    text = " " * (LEAST_CHARS + 10) + "salt " * 100
    with pytest.raises(InvalidInput, match=rf"{len(text)} characters, and its first {LEAST_CHARS} give only 2") as bad:
        tokenizer.encode(["a", text], bounds=Bounds(cut_to=16))
    assert bad.value.index == 1


def test_limits_in_characters():
    assert most_chars(None) == most_chars(1 << 20) == MOST_CHARS
    assert most_chars(8) == LEAST_CHARS
    assert most_chars(8192) == 64 * 8192
    with pytest.raises(
        InvalidInput,
        match="has 65537 characters, any prompt included; the limit is 65536 characters, since the model takes 8",
    ):
        Bounds(longest=8).check(["a", "b" * 65537])
    Bounds(longest=8, cut_to=8).check(["b" * 65537])
    Bounds(longest=8).check(["b" * 65536])
    with pytest.raises(InvalidInput, match=r"the limit is 2097152 characters$"):
        Bounds().check(["b" * (MOST_CHARS + 1)])


def test_work_is_cut_by_characters():
    texts = ["a" * 10, "b" * 10, "c" * 50, "d", "e" * 29, "f"]
    assert list(groups(texts, Bounds(), 30)) == [range(2), range(2, 3), range(3, 5), range(5, 6)]
    assert list(groups([], Bounds(), 30)) == []


def start(work):
    return asyncio.get_running_loop().create_task(work)


def test_a_pool_takes_turns_and_forgets_who_left():
    async def run():
        pool = TokenizerPool(1, 3)
        order, go = [], threading.Event()

        def piece(name):
            def work():
                go.wait(10)
                order.append(name)

            return Piece(work)

        try:
            first = start(pool.run(piece("first") for _ in range(3)))
            gone = start(pool.run(piece("gone") for _ in range(50)))
            short = start(pool.run([piece("short")]))
            await asyncio.sleep(0.02)
            assert pool.depth == 3
            with pytest.raises(Overloaded, match="3 requests wait to be tokenised, the limit is 3") as full:
                await pool.run([piece("more")])
            assert full.value.retry_after_s
            gone.cancel()
            await asyncio.wait([gone])
            go.set()
            await asyncio.gather(first, short)
            assert order == ["first", "short", "first", "first"]
            assert pool.depth == 0
        finally:
            go.set()
            pool.close()

    asyncio.run(run())


def test_the_depth_counts_work_that_runs_on_without_its_caller():
    async def run():
        pool, go = TokenizerPool(1, 3), threading.Event()
        left = start(pool.run([Piece(go.wait), Piece(go.wait)]))
        await asyncio.sleep(0.02)
        left.cancel()
        await asyncio.sleep(0.02)
        assert left.cancelled()
        assert pool.depth == 1
        go.set()
        while pool.depth:
            await asyncio.sleep(0.001)
        pool.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_long_text_holds_up_no_short_one():
    async def run():
        pool, go = TokenizerPool(1, 8), threading.Event()
        long = [start(pool.run([Piece(go.wait, long=True)])) for _ in range(3)]
        assert await asyncio.wait_for(pool.run([Piece(lambda: 5)]), 5) == [5]
        go.set()
        await asyncio.gather(*long)
        assert pool.depth == 0
        pool.close()

    asyncio.run(run())


def test_answers_of_a_cut_text(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:
        text = "the river meets the sea " * 100_000
        refused = live.embed(["a", text])
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["index"]) == (400, "input", 1)
        assert f"{len(text)} characters" in error["message"]
        assert f"{LEAST_CHARS} characters" in error["message"]
        started = time.monotonic()
        cut = live.embed(text, truncate=True).json()
        assert time.monotonic() - started < 5
        assert cut["usage"]["prompt_tokens"] == MAX_TOKENS
        short = live.embed("the river meets the sea " * 100, truncate=True).json()
        assert cut["data"][0]["embedding"] == short["data"][0]["embedding"]


def test_two_huge_requests_whose_callers_leave_hold_up_nobody(text_folder, tmp_path):
    """20 MB as one text, and as texts of the longest kind: a text of 6 KB is answered meanwhile, in little memory."""
    engine = {"folder": str(text_folder), "pids": str(tmp_path / "pids")}
    with running("serve", folder=str(text_folder), engines=[engine], config={}) as process:
        base = f"http://{ports(process)[0]}"
        with httpx.Client(base_url=base, timeout=30) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            before = memory(process.pid)
            words = "the river meets the sea "
            huge = [words * 830_000, [words * 830] * 1000]
            for value in huge:
                timeout = httpx.Timeout(10, read=0.0001)
                with httpx.Client(base_url=base, timeout=timeout) as impatient, pytest.raises(httpx.ReadTimeout):
                    impatient.post("/v1/embeddings", json={"input": value})
            started = time.monotonic()
            answer = client.post("/v1/embeddings", json={"input": words * 250, "truncate": True})
            assert answer.status_code == 200
            assert time.monotonic() - started < 2
            wait_for(lambda: "rose_tokenizer_pool_depth 0.0" in client.get("/metrics").text, timeout_s=2)
            assert memory(process.pid) - before < 400 << 20


def memory(pid):
    """The most memory a process has held, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_no_ids_are_lost_between_pieces(tmp_path):
    tiny_tokenizers.save(tiny_tokenizers.word_piece(), tmp_path)
    tokenizer = TextTokenizer(tmp_path, inline_chars=10)
    texts = ["salt " * (1 + 997 * i % 9001) for i in range(40)]
    found = asyncio.run(tokenizer.encode_async(texts))
    assert all(np.array_equal(one, tokenizer.encode([text])[0]) for one, text in zip(found, texts, strict=True))
    tokenizer.close()


@pytest.mark.parametrize("kind", ["compared", "pair", "template"])
def test_long_texts_of_pairs_are_named(text_folder, tmp_path, kind):
    """The query is refused, a document is refused or cut."""
    folder, card, method = text_folder, card_for(text_folder), "dense"
    if kind != "compared":
        make = tiny_qwen3_reranker if kind == "template" else tiny_cross_encoder_bert
        folder, method = make(tmp_path / kind), "cross"
        card = reranker_card(folder, max_tokens=512, vocab_size=2000)
    huge = "the river meets the sea " * 100_000
    with live_front(folder, card) as live:

        def rerank(query, documents, **fields):
            return live.client.post("/v1/rerank", json={"query": query, "documents": documents, **fields})

        for fields, param, index in (
            ({"query": huge, "documents": ["a", "b"], "truncate": True}, "query", None),
            ({"query": "a", "documents": ["b", huge]}, "documents", 1),
        ):
            refused = rerank(**fields, method=method)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["index"]) == (400, param, index)
            count = int(re.search(r"the text has (\d+) characters, any prompt included", error["message"])[1])
            assert len(huge) <= count < len(huge) + 200
        refused = live.client.post("/v1/score", json={"text_1": ["a", huge], "text_2": ["b", "c"], "method": method})
        assert (refused.json()["error"]["param"], refused.json()["error"]["index"]) == ("text_1", 1)
        cut = rerank("a", ["b", huge], method=method, truncate=True)
        same = rerank("a", ["b", huge[:6000]], method=method, truncate=True)
        assert cut.json()["results"] == same.json()["results"]
        cut = rerank("a", ["b", huge], method=method, max_tokens_per_doc=9)
        assert (
            cut.json()["results"]
            == rerank("a", ["b", huge[:400]], method=method, max_tokens_per_doc=9).json()["results"]
        )


def test_a_long_chunk_is_named_with_its_document():
    error = InvalidInput("too long", param="input", index=3)
    found = _of_document(error, [["a", "b"], ["c", "d"], ["e"]])
    assert (found.message, found.param, found.index) == ("chunk 1: too long", "input", 1)
