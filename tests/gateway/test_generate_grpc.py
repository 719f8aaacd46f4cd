"""Generate of rose.v1.Rose at a front: text and messages in, tokens and text out."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from rose.errors import NonFinite, Overloaded
from rose.proto import rose_pb2 as pb
from rose.proto import rose_pb2_grpc
from rose.proto.convert import tokens_to_proto
from tests.gateway.conftest import card_for, live_front
from tests.gateway.generating import ANSWER, generating_front, make_folder, wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("grpc") / "tiny")


@pytest.fixture(scope="module")
def shared(folder):
    with generating_front(folder) as chat:
        yield chat


@pytest.fixture
def tiny(shared):
    shared.reset()
    return shared


@pytest.fixture(scope="module")
def stub(shared):
    with grpc.insecure_channel(shared.live.listening.grpc) as channel:
        yield rose_pb2_grpc.RoseStub(channel)


def tokens(*ids):
    return tokens_to_proto([np.array(one, dtype=np.int32) for one in ids])


def failed(call):
    """Status and the Error beside it."""
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    trailing = dict(refused.value.trailing_metadata())
    return refused.value.code(), pb.Error.FromString(trailing["rose-error-bin"])


def test_text(tiny, stub):
    chunks = list(stub.Generate(pb.GenerateRequest(text="hello", sampling=pb.Sampling(max_new_tokens=64))))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert [token for chunk in chunks for token in chunk.tokens] == [*tiny.ids(ANSWER), tiny.end]
    assert [chunk.finish for chunk in chunks] == [pb.UNFINISHED] * (len(chunks) - 1) + [pb.STOP]
    last = chunks[-1]
    assert (last.prompt_tokens, last.completion_tokens) == (len(tiny.ids("hello")), len(tiny.ids(ANSWER)) + 1)
    assert (last.timing.queue_us, last.timing.compute_us) == (100, 600)
    assert tiny.prompt() == tiny.ids("hello")


def test_messages_and_tokens(tiny, stub):
    messages = pb.Messages(items=[pb.Message(role="user", content="hi <|im_end|>")])
    list(stub.Generate(pb.GenerateRequest(messages=messages, model="chat")))
    decoded = tiny.tokenizer.decode(tiny.prompt(), skip_special_tokens=False)
    assert decoded == "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert tiny.prompt().count(tiny.end) == 1
    assert tiny.engine.generated[-1].sampling.max_new_tokens == 512 - len(tiny.prompt())
    list(stub.Generate(pb.GenerateRequest(tokens=tokens([5, 6, 7]))))
    assert tiny.prompt() == [5, 6, 7]


def test_stop_strings_and_log_probabilities(tiny, stub):
    tiny.engine.pause_s = 0.02  # so that the engine is not through before the stop string is seen
    sampling = pb.Sampling(max_new_tokens=64, stop=["猫", "zzz"], logprobs=1)
    chunks = list(stub.Generate(pb.GenerateRequest(text="hello", sampling=sampling)))
    assert "".join(chunk.text for chunk in chunks) == "The river "
    assert (chunks[-1].finish, chunks[-1].stop) == (pb.STOP, "猫")
    assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in chunks)
    assert chunks[0].logprobs[0].top[0].token == chunks[0].tokens[0]
    assert list(tiny.engine.generated[-1].sampling.stop) == []
    wait_for(lambda: len(tiny.engine.cancelled) == 1)
    length = list(stub.Generate(pb.GenerateRequest(text="hello", sampling=pb.Sampling(max_new_tokens=2))))
    assert (length[-1].finish, length[-1].stop) == (pb.LENGTH, "")
    assert not any(chunk.logprobs for chunk in length)


def test_sampling_is_passed_on_with_the_schemas_defaults(tiny, stub):
    given = pb.Sampling(
        max_new_tokens=9, temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, seed=0, stop_ids=[4], ignore_eos=True,
        min_new_tokens=2, logprobs=0,
    )  # fmt: skip
    list(stub.Generate(pb.GenerateRequest(text="x", sampling=given, priority=pb.BULK)))
    assert tiny.engine.generated[-1].sampling == given
    assert tiny.engine.generated[-1].priority == pb.BULK
    list(stub.Generate(pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=0))))
    got = tiny.engine.generated[-1].sampling
    assert (got.temperature, got.top_p, got.HasField("seed"), got.HasField("logprobs")) == (0.0, 1.0, False, False)


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (pb.GenerateRequest(), "text", "neither text, messages nor tokens"),
        (pb.GenerateRequest(text=""), "text", "empty"),
        (pb.GenerateRequest(messages=pb.Messages()), "messages", "at least one message"),
        (pb.GenerateRequest(messages=pb.Messages(items=[pb.Message(role="x")])), "messages", "the role is 'x'"),
        (pb.GenerateRequest(tokens=pb.Tokens()), "tokens", "no sequence"),
        (pb.GenerateRequest(tokens=tokens([5], [6])), "tokens", "2 sequences"),
        (pb.GenerateRequest(tokens=tokens([468])), "tokens", "outside the vocabulary 0..467"),
        (pb.GenerateRequest(tokens=tokens([5] * 512)), "tokens", "the prompt has 512 tokens"),
        (pb.GenerateRequest(text="salt " * 600), "text", "the model takes 512"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(max_new_tokens=512)), "max_new_tokens", "max_new_tokens of"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=-1)), "temperature", "0 or more"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(top_p=0)), "top_p", "more than 0"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(stop=[""])), "stop", "empty"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(logprobs=21)), "logprobs", "0 to 20"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(stop_ids=[468])), "stop_ids", "outside"),
    ],
)
def test_bad_requests(tiny, stub, request_, param, words):
    code, error = failed(stub.Generate(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.kind, error.param) == ("invalid_input", param)
    assert words in error.message
    assert not tiny.engine.generated


def test_failures_at_any_point(tiny, stub):
    tiny.engine.fails(Overloaded("full", retry_after_s=2.0))
    code, error = failed(stub.Generate(pb.GenerateRequest(text="x")))
    assert (code, error.kind, error.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", 2000)
    tiny.engine.fails(NonFinite("not finite"), after=2)
    call = stub.Generate(pb.GenerateRequest(text="x"))
    assert [next(call).text, next(call).text] == ["The", " river"]
    code, error = failed(call)
    assert (code, error.kind) == (grpc.StatusCode.INTERNAL, "non_finite")
    code, error = failed(stub.Generate(pb.GenerateRequest(text="x", model="other")))
    assert code is grpc.StatusCode.NOT_FOUND


def test_cancelling_and_deadlines_reach_the_engine(tiny, stub):
    """Report C149."""
    tiny.engine.hang_after = 2
    call = stub.Generate(pb.GenerateRequest(text="x"))
    assert next(call).text == "The"
    call.cancel()
    wait_for(lambda: len(tiny.engine.cancelled) == 1)
    for after in (0, 2):
        tiny.engine.hang_after = after
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(pb.GenerateRequest(text="x"), timeout=0.2))
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: len(tiny.engine.cancelled) == 3)
    wait_for(lambda: tiny.live.metric("rose_requests_in_flight") == 0)
    status = 'rose_requests_total{carrier="grpc",route="Generate",status="%s"}'
    wait_for(lambda: tiny.live.metric(status % "CANCELLED") + tiny.live.metric(status % "DEADLINE_EXCEEDED") >= 3)


def test_each_kind_of_model_says_what_it_is_for(tiny, stub, text_folder):
    code, error = failed(iter(lambda: stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=["a"]))), None))
    assert (code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
    assert "'tiny/chat' continues texts" in error.message
    with live_front(text_folder, card_for(text_folder)) as live, grpc.insecure_channel(live.listening.grpc) as channel:
        code, error = failed(rose_pb2_grpc.RoseStub(channel).Generate(pb.GenerateRequest(text="x")))
        assert (code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
        assert "continues no text" in error.message
