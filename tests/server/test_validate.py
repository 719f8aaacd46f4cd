"""Every way a request can be wrong has a name, a field, an item and a limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.engine.request import Priority
from rose.errors import InvalidInput, PayloadTooLarge, RoseError, UnknownModel, Unsupported
from rose.proto import rose_pb2 as pb
from rose.proto.annotations import spans_to_proto
from rose.proto.convert import tokens_to_proto
from rose.server.validate import Limits, validate
from tests.server.fake_engine import DIMENSION, OUTPUTS

LIMITS = Limits(
    served_name="fake",
    outputs=OUTPUTS,
    default_output="plain",
    vocab_size=1000,
    max_tokens=16,
    max_request_items=4,
    max_request_tokens=40,
    max_answer_bytes=1000,
)


def request(*sequences, **fields) -> pb.EmbedRequest:
    return pb.EmbedRequest(tokens=tokens_to_proto([np.array(ids, dtype=np.int32) for ids in sequences]), **fields)


def refused(message: pb.EmbedRequest, kind: type[RoseError]) -> RoseError:
    with pytest.raises(kind) as caught:
        validate(message, LIMITS)
    assert type(caught.value) is kind
    return caught.value


def test_a_plain_request():
    work = validate(request([1, 2, 3], [4]), LIMITS)
    assert [ids.tolist() for ids in work.sequences] == [[1, 2, 3], [4]]
    assert list(work.specs) == ["plain"]
    assert (work.tokens, work.answer_bytes, work.priority) == (4, 2 * DIMENSION * 4, Priority.ONLINE)


def test_outputs_in_the_order_they_were_asked_for_each_once():
    assert list(validate(request([1], outputs=["unit", "plain", "unit"]), LIMITS).specs) == ["unit", "plain"]


def test_the_served_name_is_the_empty_name():
    validate(request([1], model="fake"), LIMITS)
    error = refused(request([1], model="fakes"), UnknownModel)
    assert error.param == "model"
    assert "'fakes'" in error.message
    assert "'fake'" in error.message


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1])
def test_ids_outside_the_vocabulary(bad):
    """Report C60 (vllm#11375, langchain#12854): -1, vocab_size and 2^31 - 1 are refused, vocab_size - 1 works."""
    error = refused(request([999], [1, bad]), InvalidInput)
    assert (error.param, error.index) == ("input", 1)
    assert f"token id {bad}" in error.message
    assert "0..999" in error.message
    validate(request([999, 0]), LIMITS)


def test_a_sequence_longer_than_the_model_takes():
    """Report C42 (tei#723, tei#694): it could never fit a batch, so it is refused before it waits."""
    validate(request([1] * 16), LIMITS)
    error = refused(request([1], [1] * 17), InvalidInput)
    assert (error.param, error.index) == ("input", 1)
    assert "17 tokens" in error.message
    assert "limit of 16" in error.message


def test_more_items_than_a_request_may_have():
    validate(request(*[[1]] * 4), LIMITS)
    error = refused(request(*[[1]] * 5), PayloadTooLarge)
    assert error.param == "input"
    assert "5 items, over the limit of 4" in error.message


def test_more_tokens_than_the_queue_ever_holds():
    error = refused(request([1] * 16, [1] * 16, [1] * 9), PayloadTooLarge)
    assert "41 tokens, over the queue's limit of 40" in error.message


def test_an_answer_that_fits_no_frame():
    """Report C153 (ai-gateway#1209): an answer can be many times its request, and is counted before it is made."""
    message = request(*[[1] * 10] * 4, outputs=["tokens", "plain", "unit"])
    with pytest.raises(PayloadTooLarge) as caught:
        validate(message, replace(LIMITS, max_answer_bytes=400))
    error = caught.value
    splits = 5 * 5  # of the four items of the per-token output, at most five bytes each
    size = 40 * 3 * 4 + splits + 2 * 4 * DIMENSION * 4
    assert error.message.startswith(f"the answer would have {size} bytes, over the limit of 400 (--max-payload)")
    assert "send fewer items" in error.message


@pytest.mark.parametrize(
    ("message", "index"),
    [(pb.EmbedRequest(), None), (request(), None), (pb.EmbedRequest(tokens=pb.Tokens(lengths=[0])), 0)],
)
def test_nothing_to_embed(message, index):
    error = refused(message, InvalidInput)
    assert (error.param, error.index) == ("input", index)


def test_texts_are_a_gateways_business():
    error = refused(pb.EmbedRequest(texts=pb.Texts(items=["hello"])), Unsupported)
    assert error.param == "input"
    assert "tokenizer" in error.message
    assert refused(request([1], prompt_name="query"), InvalidInput).param == "prompt_name"


def test_outputs_unknown_and_unavailable():
    """Report C110 (FlagEmbedding#550): weights of a head that was not loaded are refused, not made up."""
    error = refused(request([1], outputs=["plain", "dense"]), InvalidInput)
    assert error.param == "outputs"
    assert "no output 'dense', it has: int8, late, plain, score, sparse, tokens, unit, weights" in error.message
    assert "sparse_linear.pt is missing" in refused(request([1], outputs=["sparse"]), InvalidInput).message


@pytest.mark.parametrize("dimensions", [1, DIMENSION - 1, DIMENSION])
def test_any_dimensions_up_to_the_whole(dimensions):
    """Report C69 (vllm#15465, mem0#3101): equal to the model's own is accepted like any smaller one."""
    work = validate(request([1], [2], dimensions=dimensions), LIMITS)
    assert work.answer_bytes == 2 * dimensions * 4


def test_dimensions_that_make_no_sense():
    error = refused(request([1], dimensions=DIMENSION + 1), InvalidInput)
    assert error.param == "dimensions"
    assert f"expected 1 to {DIMENSION}" in error.message
    assert "int8" in refused(request([1], dimensions=2, outputs=["plain", "int8"]), InvalidInput).message
    assert "per-token" in refused(request([1], dimensions=2, outputs=["tokens"]), InvalidInput).message
    validate(request([1], dimensions=4, outputs=["int8"]), LIMITS)


@pytest.mark.parametrize(("output", "words"), [("score", "is a score"), ("weights", "is lexical weights")])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_scores_and_weights_have_no_dimensions(output, words, dimensions):
    error = refused(request([1], outputs=[output], dimensions=dimensions), InvalidInput)
    assert error.param == "dimensions"
    assert words in error.message
    validate(request([1], outputs=[output]), LIMITS)


def int32(*values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_token_types_lie_beside_the_ids():
    limits = replace(LIMITS, type_vocab_size=2)
    message = request([1, 2, 3], [4], token_types=int32(0, 1, 1, 0).tobytes())
    work = validate(message, limits)
    assert [types.tolist() for types in work.token_types] == [[0, 1, 1], [0]]
    assert validate(request([1]), limits).token_types is None


@pytest.mark.parametrize(
    ("types", "words", "index"),
    [
        ((0, 1), "hold 8 bytes, expected 4 for each of 3 ids", None),
        ((0, 1, 2), r"token type 2 at position 0 is outside this model's token types 0..1", 1),
        ((0, -1, 0), r"token type -1 at position 1 is outside", 0),
    ],
)
def test_token_types_that_do_not_fit(types, words, index):
    with pytest.raises(InvalidInput, match=words) as raised:
        validate(request([1, 2], [3], token_types=int32(*types).tobytes()), replace(LIMITS, type_vocab_size=2))
    assert (raised.value.param, raised.value.index) == ("token_types", index)


def test_a_model_without_token_types_takes_zeros_only():
    limits = replace(LIMITS, type_vocab_size=0)
    validate(request([1, 2], token_types=int32(0, 0).tobytes()), limits)
    with pytest.raises(InvalidInput, match=r"outside this model's token types 0\.\.0"):
        validate(request([1, 2], token_types=int32(0, 1).tobytes()), limits)


def spans(*items) -> pb.Spans:
    return spans_to_proto([int32(*[bound for pair in pairs for bound in pair]).reshape(-1, 2) for pairs in items])


def test_spans_of_each_item_and_what_their_answer_takes():
    work = validate(request([1, 2, 3], [4], spans=spans([(0, 1), (1, 3)], []), outputs=["plain", "int8"]), LIMITS)
    assert [bounds.tolist() for bounds in work.spans] == [[[0, 1], [1, 3]], []]
    assert work.answer_bytes == 2 * (DIMENSION * 4 + 4) + 2 * 5 * 3
    assert validate(request([1]), LIMITS).spans is None


@pytest.mark.parametrize(
    ("message", "words", "index"),
    [
        (request([1, 2], spans=spans([(0, 3)])), r"span 0 of item 0 is 0\.\.3: .* <= 2", 0),
        (request([1], [1, 2], spans=spans([], [(0, 1), (2, 1)])), r"span 1 of item 1 is 2\.\.1", 1),
        (request([1], [2], spans=spans([(0, 1)])), "counts for 1 items, the request has 2", None),
        (request([1], spans=pb.Spans(counts=[1], bounds=bytes(4))), "the message holds 4 bytes, not 8 a span", None),
        (request([1], spans=spans([(0, 1)]), outputs=["weights"]), "'weights' is per token", None),
        (request([1], spans=spans([(0, 1)]), outputs=["plain", "score"]), "'score' scores whole sequences", None),
    ],
)
def test_spans_that_make_no_sense(message, words, index):
    with pytest.raises(InvalidInput, match=words) as raised:
        validate(message, LIMITS)
    assert (raised.value.param, raised.value.index) == ("spans", index)


def test_spans_are_counted_before_they_are_computed():
    """Report C153 (ai-gateway#1209): a short sequence may ask for any number of rows."""
    message = request([1] * 10, spans=spans([(0, 10)] * 1000))
    with pytest.raises(PayloadTooLarge, match=f"{1000 * DIMENSION * 4 + 10} bytes, over the limit of 1000"):
        validate(message, LIMITS)


def test_tokens_without_a_row_are_not_counted():
    assert validate(request([1] * 5, [1], outputs=["late"]), LIMITS).answer_bytes == 4 * 2 * 4 + 5 * 3


def test_a_priority_from_the_future():
    assert validate(request([1], priority=pb.BULK), LIMITS).priority is Priority.BULK
    message = pb.EmbedRequest.FromString(request([1]).SerializeToString() + b"\x30\x07")
    assert refused(message, InvalidInput).param == "priority"


@given(st.binary(max_size=200))
def test_any_bytes_that_parse_are_work_or_a_named_error(data):
    try:
        message = pb.EmbedRequest.FromString(data)
    except Exception:
        return
    try:
        work = validate(message, LIMITS)
    except RoseError:
        return
    assert 0 < len(work.sequences) <= 4
    assert all(0 <= int(i) < 1000 for ids in work.sequences for i in ids)
