"""`python -m rose.server` on a small Qwen3 language model, against transformers on the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.client import AsyncClient, Client
from rose.errors import Cancelled, InvalidInput, Unsupported
from rose.proto import rose_pb2 as pb
from rose.proto.frames import FrameType, encode_frame
from rose.server.__main__ import main
from tests.server.generate_frames import answer, ask, payload
from tests.server.generate_process import Process
from tests.server.running_server import RawPeer
from tests.support.tiny_checkpoints import tiny_bert
from tests.support.tiny_language_models import sample_ids, tiny_lm

MAX_TOKENS, TOKENS = 256, 464
LENGTHS = (1, 2, 7, 16, 17, 31, 64, 100)
# Fewer pages than what runs at a time wants: sequences lose theirs and go on later. A page of 16 tokens takes 2 layers
# of keys and values, 2 heads of 32 numbers each: 16 KiB in fp32.
FEW_PAGES = 21 * 16384


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_lm(tmp_path_factory.mktemp("generating") / "lm", "qwen3", max_positions=MAX_TOKENS)


@pytest.fixture(scope="module")
def server(folder):
    with Process(folder, "--num-threads", "1") as process:
        yield process


@pytest.fixture(scope="module")
def reference(folder):
    """Greedy continuations of transformers, remembered."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known: dict[tuple[int, ...], list[int]] = {}
    # Rows of the head that are no tokens of the tokenizer are never drawn.
    options = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": list(range(TOKENS, 468))}
    model.generation_config.eos_token_id = None

    def greedy(ids, count: int) -> list[int]:
        key = tuple(ids)
        if len(known.get(key, ())) < count:
            with torch.inference_mode():
                whole = model.generate(torch.tensor([key]), **options, max_new_tokens=count, min_new_tokens=count)
            known[key] = whole[0, len(key) :].tolist()
        return known[key][:count]

    return greedy


def prompts(lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    # Below the tokenizer's special tokens.
    random = np.random.default_rng(seed)
    return [random.integers(5, 400, size=n).tolist() for n in lengths]


def greedy(client: Client, ids, count: int, **fields) -> list[int]:
    chunks = client.generate(ids, max_new_tokens=count, temperature=0.0, ignore_eos=True, **fields)
    return [token for chunk in chunks for token in chunk.tokens]


def test_greedy_tokens_are_those_of_transformers(server, reference):
    with Client(server.address) as client:
        for ids in prompts():
            assert greedy(client, ids, 40) == reference(ids, 40), len(ids)


def test_in_company_they_are_the_same(server, reference):
    async def one(client: AsyncClient, ids: list[int]) -> list[int]:
        tokens = client.generate(ids, max_new_tokens=40, temperature=0.0, ignore_eos=True)
        return [token async for some in tokens for token in some.tokens]

    async def main():
        clients = [await AsyncClient.connect(server.address) for _ in range(2)]
        got = await asyncio.gather(*[one(clients[i % 2], ids) for i, ids in enumerate(prompts())])
        for client in clients:
            await client.close()
        return got

    assert asyncio.run(main()) == [reference(ids, 40) for ids in prompts()]


def test_an_end_token_of_the_folder_ends_it(folder, server, reference):
    end = sample_ids(folder)["<|im_end|>"]
    with Client(server.address) as client:
        card = client.info()
        assert (card.generates, card.model, card.max_tokens, list(card.end_ids)) == (True, "tiny", MAX_TOKENS, [end])
        assert (card.vocab_size, card.max_running, len(card.tokenizer_sha256)) == (468, 64, 32)
        ids = prompts()[4]
        stop = reference(ids, 10)[6]
        chunks = list(client.generate(ids, max_new_tokens=40, temperature=0.0, stop_ids=[stop], ignore_eos=True))
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert tokens == reference(ids, 10)[: reference(ids, 10).index(stop) + 1]
        assert (chunks[-1].finish, chunks[-1].usage.completion_tokens) == ("stop", len(tokens))


def test_log_probabilities_are_those_of_transformers(folder, server):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = prompts()[5]
    with Client(server.address) as client:
        chunks = list(client.generate(ids, max_new_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    with torch.inference_mode():
        logits = model(torch.tensor([ids + tokens])).logits[0].float()
    expected = torch.log_softmax(logits[:, :TOKENS], -1)[len(ids) - 1 : -1]
    for row, token, told in zip(expected, tokens, [each for c in chunks for each in c.logprobs], strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [token for token, _ in told.top] == best.indices.tolist()
        assert [logprob for _, logprob in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_what_prompts_have_in_common_is_found_again(server, reference):
    beginning = prompts([64], seed=9)[0]
    with Client(server.address) as client:
        for ending in ([7], [8, 9], list(range(10, 40))):
            ids = beginning + ending
            *_, last = chunks = list(client.generate(ids, max_new_tokens=12, temperature=0.0, ignore_eos=True))
            assert [token for chunk in chunks for token in chunk.tokens] == reference(ids, 12)
        assert last.usage.cached_tokens == 64
        assert client.stats().engine_counters["prefix_hits"] >= 2


def test_seeds_repeat_and_others_differ(server):
    ids = prompts()[3]

    def draw(**fields):
        with Client(server.address) as client:
            chunks = client.generate(ids, max_new_tokens=30, ignore_eos=True, **fields)
            return [token for chunk in chunks for token in chunk.tokens]

    assert draw(seed=7) == draw(seed=7)
    assert len({tuple(draw(seed=seed)) for seed in range(4)}) == 4
    assert draw() != draw()


def test_cancel_in_the_middle_frees_its_pages(server):
    """Report C149 (vllm#10806)."""
    server.wait_for(pages_used=0, running=0)
    with Client(server.address) as client, RawPeer(server.address) as peer:
        ask(peer, 1, prompts()[7], max_new_tokens=150, temperature=0.0, ignore_eos=True)
        peer.frame()
        assert client.stats().engine_counters["pages_used"] > 0
        peer.send(encode_frame(FrameType.CANCEL, 1))
        answers: dict = {}
        answer(peer, answers, 1)
        assert type(answers[1][1]) is Cancelled
        server.wait_for(pages_used=0, running=0)


def test_a_client_that_disconnects_frees_them_too(server, reference):
    with RawPeer(server.address) as peer:
        for request_id in range(1, 5):
            ask(peer, request_id, prompts()[request_id], max_new_tokens=180, temperature=0.0, ignore_eos=True)
        peer.frame()
    server.wait_for(pages_used=0, running=0, waiting=0)
    with Client(server.address) as client:
        assert greedy(client, prompts()[2], 20) == reference(prompts()[2], 20)


def test_bad_requests_lose_nothing(server, reference):
    async def main():
        async with await AsyncClient.connect(server.address) as client:
            good = asyncio.ensure_future(collect(client, prompts()[6], 60))
            for ids, fields, kind in (
                ([468], {}, InvalidInput),
                ([5], {"temperature": -1.0}, InvalidInput),
                ([5] * 256, {}, InvalidInput),
                ([5] * 200, {"max_new_tokens": 57}, InvalidInput),
            ):
                with pytest.raises(kind):
                    await anext(client.generate(ids, **fields))
            with pytest.raises(Unsupported):
                await client.embed([[1]])
            with pytest.raises(Unsupported):
                await anext(client.generate_message(pb.GenerateRequest(text="hello")))
            assert await good == reference(prompts()[6], 60)

    async def collect(client, ids, count):
        tokens = client.generate(ids, max_new_tokens=count, temperature=0.0, ignore_eos=True)
        return [token async for some in tokens for token in some.tokens]

    asyncio.run(main())


@pytest.mark.parametrize("pages", ["many", "few"])
def test_two_hundred_requests_with_random_cancels_are_each_answered_once(folder, server, reference, pages):
    """Each has one end, and every token before it is the reference's, whatever was cancelled or lost its pages."""
    random = np.random.default_rng(11)
    different = prompts(random.integers(1, 90, size=12), seed=4)
    asked = {i: (int(random.integers(12)), int(random.integers(1, 40))) for i in range(1, 201)}
    long = dict(enumerate(prompts([17] * 3, seed=5), 201))
    cancelled, answers = set(), {}
    with contextlib.ExitStack() as stack:
        few = ("--kv-cache-bytes", str(FEW_PAGES), "--max-running", "16", "--num-threads", "1")
        process = server if pages == "many" else stack.enter_context(Process(folder, *few))
        peers = [stack.enter_context(RawPeer(process.address, timeout_s=60)) for _ in range(2)]
        # In one write, so that they run together however slowly the rest is asked: 16 pages each in the end.
        options = {"max_new_tokens": 230, "temperature": 0.0, "ignore_eos": True}
        frames = [encode_frame(FrameType.GENERATE, i, payload(ids, **options)) for i, ids in long.items()]
        peers[0].send(b"".join(frames))
        for i, (which, count) in asked.items():
            ask(peers[i % 2], i, different[which], max_new_tokens=count, temperature=0.0, ignore_eos=True)
            if random.random() < 0.3:
                target = int(random.integers(max(1, i - 20), i + 1))
                cancelled.add(target)
                peers[target % 2].send(encode_frame(FrameType.CANCEL, target))
        for peer, count in zip(peers, (100 + len(long), 100), strict=True):
            mine: dict = {}
            answer(peer, mine, count)
            answers |= mine
        for i, (which, count) in asked.items():
            tokens, end = answers[i]
            if isinstance(end, Cancelled):
                assert i in cancelled
            else:
                assert (end.finish, end.completion_tokens, len(tokens)) == (pb.LENGTH, count, count)
            assert tokens == reference(different[which], 40)[: len(tokens)]
        for i, ids in long.items():
            assert answers[i][0] == reference(ids, 230)
        process.wait_for(pages_used=0, running=0, waiting=0)
        with Client(process.address) as client:
            counters = client.stats().engine_counters
            assert client.stats().open_requests == 0
        if pages == "few":
            assert counters["pages_total"] == 20
            assert counters["preemptions"] > 0


def test_sigterm_finishes_what_runs(folder, reference):
    with Process(folder, "--num-threads", "1") as process:
        with RawPeer(process.address, timeout_s=30) as peer:
            for request_id, ids in enumerate(prompts(), 1):
                ask(peer, request_id, ids, max_new_tokens=60, temperature=0.0, ignore_eos=True)
            first = peer.frame()
            process.process.send_signal(signal.SIGTERM)
            answers = {first.request_id: (list(pb.GenerateChunk.FromString(first.payload).tokens), None)}
            answer(peer, answers, len(LENGTHS))
        assert process.process.wait(10) == 0
        for request_id, ids in enumerate(prompts(), 1):
            assert answers[request_id][0] == reference(ids, 60)


def test_what_is_served_is_printed_and_an_idle_server_sleeps(folder):
    with Process(folder, "--no-prefix-cache", "--page-size", "32", "--max-running", "4") as process:
        with Client(process.address) as client:
            assert len(greedy(client, [5, 6], 3)) == 3
            before = cpu_ticks(process.process.pid)
            time.sleep(1.0)
            assert cpu_ticks(process.process.pid) - before <= 1
        process.process.send_signal(signal.SIGTERM)
        _, told = process.process.communicate(timeout=20)
    for fact in ("Qwen3ForCausalLM", "pages of 32; no pages are shared", "4 sequences running", "461 (config.json"):
        assert fact in told


def cpu_ticks(pid: int) -> int:
    """User and system time in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bulk-tokens", "100"), "bulk_tokens is no budget of a model that generates"),
        (("--max-tokens", "1000"), "max_tokens of 1000: this model takes at most 256"),
        (("--kv-cache-bytes", "1"), "kv_cache_bytes of 1"),
        (("--max-running", "600", "--prefill-tokens", "512"), "prefill_tokens (512) must be more than max_running"),
        (("--page-size", "0"), "page_size"),
        (("--task", "embed"), "pooling"),
    ],
)
def test_refused_at_start(folder, capsys, arguments, words):
    assert main([str(folder), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_budgets_of_generating_are_none_of_an_embedders(tmp_path, capsys):
    bert = str(tiny_bert(tmp_path / "bert"))
    assert main([bert, "--kv-cache-bytes", "5"]) == 2
    assert "kv_cache_bytes is no budget of a model that embeds" in capsys.readouterr().err
    assert main([bert, "--task", "generate"]) == 2
    assert "cannot generate" in capsys.readouterr().err
