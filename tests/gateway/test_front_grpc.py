"""gRPC beside HTTP: the same answers and errors, health and reflection, large messages both ways, deadlines."""

from __future__ import annotations

import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rose.errors import InvalidInput, NonFinite, Overloaded, Unavailable
from rose.gateway.tokenizer import TextTokenizer
from rose.proto import rose_pb2 as pb
from rose.proto import rose_pb2_grpc
from rose.proto.convert import tensor_from_proto, tokens_to_proto
from tests.gateway.conftest import DIMENSION, MAX_TOKENS, card_for, live_front
from tests.gateway.expected import vector_of

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def channel_to(live, options=UNLIMITED):
    return grpc.insecure_channel(live.listening.grpc, options)


@pytest.fixture(scope="module")
def channel(shared):
    with channel_to(shared) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel):
    return rose_pb2_grpc.RoseStub(channel)


def tokens(*sequences):
    return tokens_to_proto([np.array(ids, dtype=np.int32) for ids in sequences])


def rows(answer):
    (output,) = answer.outputs
    return tensor_from_proto(output.values)


def failed(call):
    """Status and the Error beside it."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    trailing = dict(refused.value.trailing_metadata())
    error = pb.Error.FromString(trailing["rose-error-bin"])
    assert error.message == refused.value.details()
    return refused.value.code(), error


def test_tokens_and_texts(shared, stub, text_folder):
    answer = stub.Embed(pb.EmbedRequest(tokens=tokens([5, 6], [7])))
    assert np.array_equal(rows(answer), np.stack([vector_of([5, 6], DIMENSION), vector_of([7], DIMENSION)]))
    assert answer.prompt_tokens == 3
    assert (answer.timing.queue_us, answer.timing.compute_us, answer.timing.batches) == (100, 600, 1)
    assert answer.outputs[0].name == "dense"
    texts = ["salt", " flour \n"]
    ids = TextTokenizer(text_folder).encode(texts)
    answer = stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=texts), dimensions=16, model="embedder"))
    assert np.array_equal(rows(answer), np.stack([vector_of(one, DIMENSION)[:16] for one in ids]))


def test_a_request_of_tokens_goes_on_as_it_came_and_its_answer_comes_back_as_it_is(channel, shared, text_folder):
    (engine,) = shared.engines
    call = channel.unary_unary("/rose.v1.Rose/Embed")
    asked = pb.EmbedRequest(
        tokens=tokens([5, 6], [7, 8, 9]),
        outputs=["dense"],
        dimensions=16,
        priority=pb.BULK,
        token_types=np.array([0, 1, 0, 0, 1], dtype="<i4").tobytes(),
    )
    named = pb.EmbedRequest.FromString(asked.SerializeToString())
    named.model = "embedder"
    unknown = b"\xf8\x3f\x01"  # field 1023
    answer = call(named.SerializeToString() + unknown)
    assert engine.seen[-1] == asked, "without the model's name and what nobody here has checked"
    assert engine.seen[-1].SerializeToString() == asked.SerializeToString()
    assert answer == engine.answer(engine.card, asked).SerializeToString()


def test_prompts_are_applied_and_named(shared, stub, text_folder):
    answer, call = stub.Embed.with_call(pb.EmbedRequest(texts=pb.Texts(items=["salt"]), prompt_name="query"))
    (ids,) = TextTokenizer(text_folder).encode(["query: salt"])
    assert np.array_equal(rows(answer)[0], vector_of(ids, DIMENSION))
    assert dict(call.trailing_metadata())["rose-prompt"] == "query"


def test_info_is_the_model_card_with_the_fronts_limits(shared, stub, text_folder):
    card = stub.Info(pb.InfoRequest())
    assert card.max_request_items == 2048
    expected = card_for(text_folder, max_request_items=2048)
    assert card == expected


@pytest.mark.parametrize(
    ("request_", "param", "index", "words"),
    [
        (pb.EmbedRequest(), "input", None, "neither texts nor tokens"),
        (pb.EmbedRequest(texts=pb.Texts()), "input", None, "empty"),
        (pb.EmbedRequest(texts=pb.Texts(items=["a", ""])), "input", 1, "empty"),
        (pb.EmbedRequest(tokens=pb.Tokens()), "input", None, "no sequence"),
        (pb.EmbedRequest(tokens=pb.Tokens(ids=b"\x01\0\0\0", lengths=[1, 0])), "input", 1, "no tokens"),
        (pb.EmbedRequest(tokens=pb.Tokens(ids=b"123", lengths=[1])), "input", None, "3 bytes"),
        (pb.EmbedRequest(tokens=tokens([5], [400])), "input", 1, "token id 400"),
        (pb.EmbedRequest(tokens=tokens([5], [6, -1])), "input", 1, "token id -1 at position 1"),
        (pb.EmbedRequest(tokens=tokens([5] * (MAX_TOKENS + 1))), "input", 0, f"limit of the model is {MAX_TOKENS}"),
        (pb.EmbedRequest(texts=pb.Texts(items=["salt " * 200])), "input", 0, "has 202 tokens"),
        (pb.EmbedRequest(tokens=tokens([5]), dimensions=DIMENSION + 1), "dimensions", None, "1..64"),
        (pb.EmbedRequest(tokens=tokens([5]), outputs=["sparse"]), "outputs", 0, "it has: dense"),
        (pb.EmbedRequest(texts=pb.Texts(items=["a"]), prompt_name="x"), "prompt_name", None, "passage, query"),
        (pb.EmbedRequest(tokens=tokens([5]), prompt_name="query"), "prompt_name", None, "token ids"),
    ],
)
def test_bad_requests(stub, request_, param, index, words):
    """Reports C20, C41, C43, C60, C69: the same rules as over HTTP."""
    code, error = failed(lambda: stub.Embed(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.kind, error.param) == ("invalid_input", param)
    assert (error.index if error.HasField("index") else None) == index
    assert words in error.message
    assert stub.Embed(pb.EmbedRequest(tokens=tokens([5]))).prompt_tokens == 1


@pytest.mark.parametrize("raw", [b"\xff\xff", b"\x1a\x04\x0a\x02\xed\xa0", b"\x1a\x05\x0a\x03\xed\xa0\xbd"])
def test_broken_messages_and_lone_surrogates_are_the_callers_fault(channel, raw):
    """Report C28: protobuf text must be UTF-8; half a pair is not, and is no internal error."""
    call = channel.unary_unary("/rose.v1.Rose/Embed")
    code, error = failed(lambda: call(raw))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in error.message


def test_unknown_model(stub):
    code, error = failed(lambda: stub.Embed(pb.EmbedRequest(model="other", tokens=tokens([5]))))
    assert (code, error.kind) == (grpc.StatusCode.NOT_FOUND, "unknown_model")


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("bad", param="input", index=1),
        Overloaded("full", retry_after_s=2.2),
        Unavailable("draining"),
        NonFinite("nan", index=0),
    ],
)
def test_errors_of_the_engine_keep_their_status(shared, stub, error):
    def fault(request):
        raise error

    shared.engines[0].fault = fault
    try:
        code, told = failed(lambda: stub.Embed(pb.EmbedRequest(tokens=tokens([5], [6]))))
    finally:
        shared.engines[0].fault = lambda request: None
    assert (code.name, told.kind) == (error.grpc_status, error.kind)
    assert told.retry_after_ms == (2200 if error.retry_after_s else 0)


def test_two_thousand_vectors_of_a_thousand_numbers(text_folder):
    """Report C153 (envoy ai-gateway#1209): 2048 texts of 1024 float32 numbers are 8.4 MB, twice gRPC's own limit."""
    output = pb.OutputCard(name="dense", dtype=pb.FLOAT32, dimension=1024)
    with live_front(text_folder, card_for(text_folder, outputs=[output])) as live, channel_to(live) as channel:
        stub = rose_pb2_grpc.RoseStub(channel)
        answer = stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=[f"salt {i}" for i in range(2048)])))
        assert rows(answer).shape == (2048, 1024)
        assert answer.ByteSize() > 8 << 20
        ids = TextTokenizer(text_folder).encode(["salt 2047"])[0]
        assert np.array_equal(rows(answer)[2047], vector_of(ids, 1024))


@pytest.mark.parametrize("size", [(4 << 20) - 1, 4 << 20, (4 << 20) + 1])
def test_messages_around_four_mebibytes_pass_both_ways(text_folder, size):
    """Report C153: gRPC's default limit is no limit here, neither for the question nor for the answer."""
    dimension = 32768
    output = pb.OutputCard(name="dense", dtype=pb.FLOAT32, dimension=dimension)
    with live_front(text_folder, card_for(text_folder, outputs=[output])) as live, channel_to(live) as channel:
        call = channel.unary_unary("/rose.v1.Rose/Embed", response_deserializer=pb.EmbedResponse.FromString)
        question = padded(pb.EmbedRequest(tokens=tokens([5, 6])).SerializeToString(), size)
        assert len(question) == size
        assert call(question).prompt_tokens == 2
        items = size // (4 * dimension) + 1
        answer = call(pb.EmbedRequest(tokens=tokens(*[[5 + i] for i in range(items)])).SerializeToString())
        assert rows(answer).shape == (items, dimension)
        assert answer.ByteSize() > size


def padded(message, size):
    """The message with an unknown field of as many bytes as it takes: receivers skip it."""
    rest = size - len(message) - 2  # key 0x7a: field 15, length-delimited
    for width in range(1, 6):
        length = rest - width
        head = bytes([(length >> 7 * i & 0x7F) | (0x80 if i < width - 1 else 0) for i in range(width)])
        if length >> 7 * width == 0 and (width == 1 or length >> 7 * (width - 1)):
            return message + b"\xfa\x01" + head + b"\0" * length
    raise AssertionError(size)


def test_a_message_over_the_limit_is_refused_with_the_limit(text_folder):
    with live_front(text_folder, card_for(text_folder), max_body_bytes=10_000) as live, channel_to(live) as channel:
        stub = rose_pb2_grpc.RoseStub(channel)
        code, error = failed(lambda: stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=["a" * 10_000]))))
        assert (code, error.kind) == (grpc.StatusCode.INVALID_ARGUMENT, "payload_too_large")
        assert "limit is 10000 bytes" in error.message
        code, error = failed(lambda: stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=["a"] * 2049))))
        assert error.kind == "payload_too_large"
        assert "2049 items" in error.message
        with pytest.raises(grpc.RpcError) as refused:  # far over it, gRPC itself does not read it
            stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=["a" * 100_000])))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Embed(pb.EmbedRequest(tokens=tokens([5]))).prompt_tokens == 1


def test_deadlines_reach_the_engine_and_cancel_there(text_folder):
    """Report C148 (infinity#546): the caller's deadline is the engine's."""
    with live_front(text_folder, card_for(text_folder)) as live, channel_to(live) as channel:
        stub, (engine,) = rose_pb2_grpc.RoseStub(channel), live.engines
        stub.Embed(pb.EmbedRequest(tokens=tokens([5])), timeout=60.0)
        # gRPC sends timeouts of 10 to 100 s in tenths of a second, rounded up (chttp2/transport/timeout_encoding.cc).
        assert 30_000 < engine.deadlines[-1] <= 60_100
        stub.Embed(pb.EmbedRequest(tokens=tokens([5])))
        assert engine.deadlines[-1] == pytest.approx(300_000, abs=30_000)
        engine.backwards = 1000
        with pytest.raises(grpc.RpcError) as refused:
            stub.Embed(pb.EmbedRequest(tokens=tokens([5])), timeout=0.1)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: len(engine.cancelled) == 1)
        call = stub.Embed.future(pb.EmbedRequest(tokens=tokens([5])))
        wait_for(lambda: len(engine.seen) == 4)
        call.cancel()
        wait_for(lambda: len(engine.cancelled) == 2)
        wait_for(lambda: live.metric("rose_requests_in_flight") == 0)
        assert live.metric('rose_requests_total{carrier="grpc",route="Embed",status="OK"}') == 2


def wait_for(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("service", ["", "rose.v1.Rose"])
def test_health_follows_readiness(text_folder, service):
    """Report C155 (tei#488): the standard service, checked and watched, per service and for the whole server."""
    with live_front(text_folder, card_for(text_folder)) as live, channel_to(live) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service=service)
        wait_for(lambda: stub.Check(asked).status == SERVING)
        watch = stub.Watch(asked)
        assert next(watch).status == SERVING
        live.run(live.engines[0].__aexit__)
        assert next(watch).status == NOT_SERVING
        assert stub.Check(asked).status == NOT_SERVING
        watch.cancel()


def test_health_says_not_serving_while_loading_and_while_draining(text_folder):
    card = card_for(text_folder, tokenizer_sha256=b"other")
    with live_front(text_folder, card, wait_ready=False) as live, channel_to(live) as channel:
        asked = health_pb2.HealthCheckRequest(service="rose.v1.Rose")
        assert health_pb2_grpc.HealthStub(channel).Check(asked).status == NOT_SERVING
    with live_front(text_folder, card_for(text_folder)) as live, channel_to(live) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest()
        wait_for(lambda: stub.Check(asked).status == SERVING)
        live.loop.call_soon_threadsafe(live.front.lifecycle.drain)
        wait_for(lambda: stub.Check(asked).status == NOT_SERVING)
        code, error = failed(lambda: rose_pb2_grpc.RoseStub(channel).Embed(pb.EmbedRequest(tokens=tokens([5]))))
        assert (code, error.kind) == (grpc.StatusCode.UNAVAILABLE, "unavailable")


def test_health_does_not_know_other_services(channel):
    with pytest.raises(grpc.RpcError) as refused:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nope"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_names_the_services_and_their_schema(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="rose.v1.Rose"),
    ]
    listed, schema = stub.ServerReflectionInfo(iter(asked))
    names = {service.name for service in listed.list_services_response.service}
    assert {"rose.v1.Rose", "grpc.health.v1.Health"} <= names
    assert schema.file_descriptor_response.file_descriptor_proto == [pb.DESCRIPTOR.serialized_pb]


def test_an_input_that_is_too_long_is_not_told_of_a_field_that_grpc_lacks(shared):
    with channel_to(shared) as channel:
        stub = rose_pb2_grpc.RoseStub(channel)
        long = "salt " * 300
        for call in (
            lambda: stub.Embed(pb.EmbedRequest(texts=pb.Texts(items=[long]))),
            lambda: stub.Rerank(pb.RerankRequest(query="salt", documents=[long])),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details().endswith("; shorten it")
    assert shared.embed(long).json()["error"]["message"].endswith("; shorten it or send truncate=true")


def test_a_message_that_quotes_megabytes_fits_into_metadata(shared):
    with channel_to(shared) as channel:
        stub = rose_pb2_grpc.RoseStub(channel)
        for name in ("m" * 1_000_000, "\u732b" * 300_000):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Embed(pb.EmbedRequest(model=name, tokens=tokens([5])))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert refused.value.details().startswith(f"the model '{name[:50]}")
            assert len(refused.value.details()) < 600


def test_messages_share_the_room_for_bodies(text_folder):
    size = 100_000
    with (
        live_front(text_folder, card_for(text_folder), max_body_bytes=size, max_held_bytes=size) as live,
        channel_to(live) as channel,
    ):
        stub, (engine,) = rose_pb2_grpc.RoseStub(channel), live.engines
        engine.backwards = 1000
        large = pb.EmbedRequest(tokens=tokens([5]), model="embedder", prompt_name="")
        padded = pb.EmbedRequest.FromString(large.SerializeToString() + b"\xfa\x7f" + _varint(70_000) + b"x" * 70_000)
        first = stub.Embed.future(padded)
        wait_for(lambda: len(engine.seen) == 1)
        assert live.front.bodies.used > 70_000
        with pytest.raises(grpc.RpcError) as refused:
            stub.Embed(padded)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the limit is 100000 bytes for all" in refused.value.details()
        engine.backwards = 1
        engine.release()
        assert first.result(10).prompt_tokens == 1
        wait_for(lambda: live.front.bodies.used == 0)


def _varint(number):
    return bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])
