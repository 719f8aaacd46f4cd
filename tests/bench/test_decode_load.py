"""Decoding as a load: arithmetic of streams, the check before the clock, the completions client, and the command."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import weakref
from contextlib import closing

import numpy as np
import pytest
import torch

from rose.bench import breakdown, commands, decode, decode_profile, records, targets
from rose.bench.completions import Answer, CompletionsClient
from rose.bench.decode_reference import DecodeReference
from rose.bench.decode_ways import EngineWay, Stream, WrongAnswerError, checked
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.shapes import build_checkpoint
from rose.config import EngineConfig, read_model_folder
from rose.convert.load import load_generative
from rose.engine.generation.build import build_generation_engine
from rose.errors import DeadlineExceeded, InvalidInput, Unavailable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_checkpoint("tiny-qwen3", tmp_path_factory.mktemp("lm") / "tiny-qwen3", shapes=LLM_SHAPES)


@pytest.fixture(scope="module")
def read(folder):
    return read_model_folder(folder, task="generate")


def engine_way(read):
    model = load_generative(read, "cpu", torch.float32)
    return EngineWay(build_generation_engine(model, EngineConfig(max_tokens=200, max_running=8)))


def test_times_of_a_round():
    streams = [Stream(0.0, [1.0, 2.0, 3.0, 5.0]), Stream(0.5, [2.5, 3.0, 3.5, 4.5])]
    timed = decode.Timed()
    decode._take(streams, timed)
    assert timed.requests == [5.0, 4.0]
    assert timed.first == [1.0, 2.0]
    assert timed.per_token == [pytest.approx(4 / 3), pytest.approx(2 / 3)]
    assert timed.gaps == [1.0, 1.0, 2.0, 0.5, 0.5, 1.0]
    # From 2.5 on both decode: one token at 3.0 and 5.0, one at 2.5, 3.0, 3.5 and 4.5.
    assert timed.steps == [2.0, pytest.approx(2 / 3)]


def test_prompts_share_no_beginning(read):
    made = [p for seed in range(3) for p in decode.make_prompts(read, 16, 4, seed=seed)]
    assert len({tuple(ids[:2].tolist()) for ids in made}) == len(made)
    assert max(int(ids.max()) for ids in made) < 1000


def test_the_engine_gives_every_token_and_its_time(read):
    with closing(engine_way(read)) as way:
        streams = way.generate(decode.make_prompts(read, 20, 3, seed=1), 9)
        again = way.generate(decode.make_prompts(read, 20, 3, seed=1), 9)
    assert [stream.ids for stream in streams] == [stream.ids for stream in again]
    for stream in streams:
        assert len(stream.ids) == len(stream.times) == 9
        assert stream.start < stream.times[0]
        assert stream.times == sorted(stream.times)


def test_kernels_that_overlap_and_gaps_come_to_the_step():
    """b is let in while a runs, c begins after a gap, and d has ended before c: it moved nothing on."""
    spans = [("d", 60_000, 70_000), ("a", 0, 30_000), ("b", 10_000, 42_000), ("c", 50_000, 90_000)]
    own = decode_profile.own_times(spans)
    assert own == [("a", 1, 30.0), ("b", 1, 12.0), ("c", 1, 40.0), ("d", 1, 0.0)]
    assert sum(us for _, _, us in own) + sum(gap.ms for gap in breakdown.gaps(spans)) * 1e3 == pytest.approx(90.0)


def target_of(folder, out):
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    asked = parser.parse_args(["--model", f"tiny-qwen3={folder}", "--via", "engine", "--out", str(out)])
    return next(targets.targets(asked, "x", [], LLM_SHAPES))


def test_a_profile_tells_microseconds_a_step(folder, read, tmp_path, monkeypatch, capsys):
    """On a CPU nothing has spans: some of a GPU are put in, 1000 ns a step."""
    step = [("void _gemm<4>(int)", 0, 600), ("_rms_norm", 200, 700), ("_gemm", 750, 950)]

    def watch(device, run):
        before = way.counters()["batches"]
        seen = breakdown.watch(device, run)
        count = way.counters()["batches"] - before
        spans = [(name, start + 1000 * i, end + 1000 * i) for i in range(count) for name, start, end in step]
        return breakdown.Watched(seen.events, spans, seen.seconds)

    monkeypatch.setattr(decode_profile, "watch", watch)
    rounds = [decode.make_prompts(read, 20, 2, seed=seed) for seed in range(3)]
    out = tmp_path / "rows.jsonl"
    with closing(engine_way(read)) as way:
        told = decode_profile.profile_steps(way, target_of(folder, out), rounds, "triton", out)
        assert way._engine.idle
        assert way.counters()["pages_used"] == 0
    assert json.loads((tmp_path / "kernels_tiny-qwen3_decode_2x20.json").read_text()) == told
    # A step more, or two, are launched before the last one is heard of; and tokens that were on their way as it began
    # are heard of within it, so that steps may be fewer.
    steps = told["steps"]
    assert decode_profile.STEPS - 2 <= steps <= decode_profile.STEPS + 2
    gemm, norm = told["kernels"]
    assert (gemm["name"], gemm["calls"], gemm["us_a_step"], gemm["run_us"]) == ("_gemm", 2 * steps, 0.8, 0.4)
    assert (norm["kind"], norm["us_a_step"], norm["run_us"]) == ("norm", 0.1, 0.5)
    assert (told["kernels_a_step"], told["backend"]) == (3.0, "triton")
    # 50 ns before the second product, and between two steps.
    assert {(gap["before"], gap["after"]): gap["calls"] for gap in told["gaps"]} == {
        ("_rms_norm", "_gemm"): steps,
        ("_gemm", "_gemm"): steps - 1,
    }
    assert told["step_us"] == pytest.approx(1.0, abs=0.01)
    printed = capsys.readouterr().out
    assert f"tiny-qwen3 2 x 20, {steps} steps: 1.0 us a step, 0.9 in 3 kernels, 0.1 between them" in printed
    assert "no CUDA" not in printed


def test_prompts_without_room_for_a_step_are_refused_and_forgotten(folder, read, tmp_path):
    with closing(engine_way(read)) as way:
        rounds = [decode.make_prompts(read, way.longest - 5, 2, seed=seed) for seed in range(3)]
        with pytest.raises(InvalidInput, match="5 new tokens of each of 2 prompts leave no step"):
            decode_profile.profile_steps(way, target_of(folder, tmp_path / "rows.jsonl"), rounds, "", None)
        assert way._engine.idle
        (stream,) = way.generate(decode.make_prompts(read, 20, 1, seed=1), 4)
        assert len(stream.ids) == 4


def test_steps_are_profiled_and_told(folder, tmp_path, capsys):
    """On a CPU by its operators; the prompts' own batch is over by then."""
    out = tmp_path / "rows.jsonl"
    options = ["--model", f"tiny-qwen3={folder}", "--via", "engine", "--prompt", "16", "--batch", "2"]
    sizes = ["--new-tokens", "4", "--rounds", "1", "--no-check", "--profile", "--out", str(out)]
    assert commands.run_load("decode", [*options, *sizes], "x", prog="x", about="x") == 0
    told = json.loads((tmp_path / "kernels_tiny-qwen3_decode_2x16.json").read_text())
    assert (told["load"], told["tokens"], told["batch"]) == ("decode", 16, 2)
    assert decode_profile.STEPS - 2 <= told["steps"] <= decode_profile.STEPS + 2
    assert told["share_by_kind"]["product"] > 0
    assert told["gaps"] == []
    attention = next(one for one in told["kernels"] if one["name"] == "aten::scaled_dot_product_attention")
    assert attention["calls"] == 2 * told["steps"], "whole steps of two layers, and all of them"
    printed = capsys.readouterr().out
    assert "no CUDA device: operators take the kernels' place" in printed
    assert f"tiny-qwen3 2 x 16, {told['steps']} steps: " in printed
    assert len(records.read_rows(out)) == 1


def test_a_profile_that_fails_costs_no_row(folder, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(decode, "profile_steps", fail)
    out = tmp_path / "rows.jsonl"
    options = ["--model", f"tiny-qwen3={folder}", "--via", "engine", "--prompt", "16", "--batch", "1", "2"]
    sizes = ["--new-tokens", "4", "--rounds", "1", "--no-check", "--profile", "--out", str(out)]
    assert commands.run_load("decode", [*options, *sizes], "x", prog="x", about="x") == 1
    assert {row.batch for row in records.read_rows(out)} == {1, 2}
    printed = capsys.readouterr().out
    assert "tiny-qwen3 2 x 16, profile failed, no kernels:\nTraceback" in printed
    assert printed.rindex("tok/s") < printed.index("no profiler here"), "rows come before a profiler does"


def test_kernels_of_another_server_are_refused():
    options = ["--url", "http://127.0.0.1:1/v1", "--profile"]
    with pytest.raises(InvalidInput, match="--url measures another server"):
        commands.run_load("decode", options, "x", prog="x", about="x")


def test_what_was_closed_holds_no_engine(read):
    """The next way's server needs the memory that this one's cache took."""
    way = engine_way(read)
    engine = weakref.ref(way._engine)
    way.close()
    gc.collect()
    assert engine() is None


def test_tokens_are_checked_before_the_clock(read, capsys):
    reference = DecodeReference(read, torch.device("cpu"))
    with closing(engine_way(read)) as way:
        assert decode.check(way, reference, read) == 1.0

        class OneOff:
            """Another token at one place of ten."""

            via = "engine"

            def generate(self, prompts, new_tokens):
                streams = way.generate(prompts, new_tokens)
                for stream in streams:
                    stream.ids[::10] = [(i + 1) % 900 for i in stream.ids[::10]]
                return streams

        with pytest.raises(decode.DecodeDisagreementError, match="clear places"):
            decode.check(OneOff(), reference, read)
    assert "1.0000 of" in capsys.readouterr().out


def test_a_reference_sees_a_wrong_context(read):
    """Tokens of another prompt are not taken for this one's."""
    reference = DecodeReference(read, torch.device("cpu"))
    with closing(engine_way(read)) as way:
        a, b = decode.make_prompts(read, 30, 2, seed=4)
        first, second = way.generate([a, b], 16)
    assert reference.agreement([a, b], [first.ids, second.ids]).clear == 1.0
    assert reference.agreement([a, b], [second.ids, first.ids]).clear < 0.9


def test_another_number_of_tokens_is_an_error():
    with pytest.raises(WrongAnswerError, match="prompt 1 was continued by 2 tokens, not 3"):
        checked([Stream(0, [1, 2, 3]), Stream(0, [1, 2])], 3)


def test_events_of_several_tokens_keep_the_first_and_the_last_time():
    assert Answer([1.0, 2.0, 3.0], "abc", 3, "length").token_times() == [1.0, 2.0, 3.0]
    joined = Answer([1.0, 2.0, 5.0], "abcde", 5, "length").token_times()
    assert (len(joined), joined[0], joined[-1]) == (5, 1.0, 5.0)
    assert joined == sorted(joined)


async def answering(parts, asked=None):
    """A server that answers each request on a connection with these pieces, a write each."""

    async def serve(reader, writer):
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            if asked is not None:
                asked.append(json.loads(body))
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.002)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_a_stream_of_events_however_it_is_cut():
    one = event(choices=[{"text": "ab", "finish_reason": None}])
    two = event(choices=[{"text": "c", "finish_reason": "length"}])
    last = event(choices=[], usage={"completion_tokens": 2}) + b"data: [DONE]\n\n"
    whole = chunk(one[:9]) + chunk(one[9:] + two[:3]) + chunk(two[3:]) + chunk(last) + b"0\r\n\r\n"
    wire = HEAD + whole
    asked: list[dict] = []

    async def both():
        for cut in (1, 40, len(HEAD) + 12, len(wire) - 3):
            server, url = await answering([wire[:cut], wire[cut:]], asked)
            client = CompletionsClient(url, "m")
            for _ in range(2):  # the second on the same connection
                answer = await client.stream([5, 6], 2)
                assert (answer.text, answer.completion_tokens, answer.finish_reason) == ("abc", 2, "length")
                assert len(answer.times) == 2
                assert answer.times == sorted(answer.times)
            await client.close()
            server.close()

    asyncio.run(both())
    assert asked[0]["prompt"] == [5, 6]
    assert (asked[0]["max_tokens"], asked[0]["temperature"], asked[0]["ignore_eos"]) == (2, 0, True)


@pytest.mark.parametrize(
    ("wire", "told"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nno such", "404.*no such"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
            "no chunked event stream",
        ),
        (HEAD + chunk(event(error={"message": "it broke"})) + b"0\r\n\r\n", "it broke"),
    ],
)
def test_what_is_no_answer_is_told(wire, told):
    async def ask():
        server, url = await answering([wire])
        client = CompletionsClient(url, "m")
        with pytest.raises(Unavailable, match=told):
            await client.stream([1], 1)
        await client.close()
        server.close()

    asyncio.run(ask())


def test_a_stream_that_does_not_end_is_given_up():
    async def ask():
        server, url = await answering([HEAD + chunk(event(choices=[{"text": "a"}]))])
        client = CompletionsClient(url, "m", within_s=0.1)
        with pytest.raises(DeadlineExceeded, match=r"did not end a stream within 0\.1 s"):
            await client.stream([1], 2)
        await client.close()
        server.close()

    asyncio.run(ask())


def test_decode_from_folder_to_rows_over_every_way(tmp_path, folder, capfd):
    out = tmp_path / "rows.jsonl"
    size = ["--prompt", "16", "--batch", "1", "3", "--new-tokens", "8", "--rounds", "2"]
    options = ["--model", f"tiny-qwen3={folder}", *size, "--out", str(out)]
    assert commands.run_load("decode", options, "x", prog="x", about="x") == 0
    rows = records.read_rows(out)
    assert {(row.via, row.in_flight) for row in rows} == {(v, b) for v in decode.WAYS for b in (1, 3)}
    for row in rows:
        assert (row.load, row.tokens, row.new_tokens, row.n) == ("decode", 16, 8, 2 * row.in_flight)
        assert row.batch == row.in_flight
        assert row.ttft_ms is not None
        assert row.tpot_ms is not None
        assert 0 < row.ttft_ms <= row.p50_ms
        assert row.p50_ms >= 7 * row.tpot_ms * 0.5
        assert row.agreement == (None if row.via == "http" else 1.0)
        assert row.tokens_per_s == pytest.approx(row.per_s * 8, rel=0.01)
    assert np.isfinite([row.max_ms for row in rows]).all()
    assert "agree with transformers" in capfd.readouterr().out
