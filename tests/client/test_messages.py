"""What callers may hand in, and what comes back for what they may not."""

from __future__ import annotations

import numpy as np
import pytest

from rose.client.messages import connection_error, embed_request, parse_error
from rose.client.result import EmbedResult
from rose.errors import InternalError, InvalidInput, Overloaded, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_to_proto, tensor_to_proto, tokens_from_proto


@pytest.mark.parametrize(
    "sequences",
    [
        [[1, 2], [3]],
        ([1, 2], (3,)),
        [np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int64)],
        [np.array([1, 2], dtype=np.uint16), [3]],
        [np.arange(1, 5)[:2], np.arange(9)[3:9:9]],
    ],
)
def test_lists_and_arrays_of_any_integer_type(sequences):
    assert [ids.tolist() for ids in tokens_from_proto(embed_request(sequences).tokens)] == [[1, 2], [3]]


def test_one_matrix_is_a_list_of_its_rows():
    assert list(embed_request(np.ones((3, 5), dtype=np.int64)).tokens.lengths) == [5, 5, 5]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ([1.5], "integers"),
        (["a"], "integers"),
        ("ab", "integers"),
        (7, "integers"),
        ([True], "boolean"),
        ([], "no tokens"),
        ([2**31], "int32"),
        ([-(2**31) - 1], "int32"),
        (np.array([2**40]), "int32"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1]]), r"shape \(1, 1\)"),
    ],
)
def test_anything_else_is_named_with_its_item(item, words):
    """Report C60 (vllm#11375, langchain#27266): 2^31, 1.5 and true are no token ids."""
    with pytest.raises(InvalidInput, match=words) as caught:
        embed_request([[1], item])
    assert (caught.value.param, caught.value.index) == ("input", 1)


@pytest.mark.parametrize("sequences", ["a text", b"bytes", []])
def test_no_list_of_sequences(sequences):
    """Report C74 (langchain-nvidia#8): one string where a list is wanted would be embedded letter by letter."""
    with pytest.raises(InvalidInput) as caught:
        embed_request(sequences)
    assert caught.value.param == "input"


def test_outputs_and_dimensions_of_the_wrong_kind():
    with pytest.raises(InvalidInput, match="list of names"):
        embed_request([[1]], outputs="dense")
    with pytest.raises(InvalidInput, match="-1"):
        embed_request([[1]], dimensions=-1)


def test_results_by_name_and_item():
    dense = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows = np.arange(10, dtype=np.int8).reshape(5, 2)
    result = EmbedResult.from_message(
        pb.EmbedResponse(
            outputs=[
                pb.Output(name="dense", values=tensor_to_proto(dense)),
                pb.Output(name="rows", values=tensor_to_proto(rows), splits=[0, 2, 5]),
            ],
            prompt_tokens=9,
            timing=pb.Timing(queue_us=1500, compute_us=250, batches=2),
        )
    )
    np.testing.assert_array_equal(result.vectors, dense)
    np.testing.assert_array_equal(result.item("dense", 1), dense[1])
    np.testing.assert_array_equal(result.item("rows", 1), rows[2:5])
    assert result.splits == {"rows": (0, 2, 5)}
    assert (result.prompt_tokens, result.timing.queue_s, result.timing.compute_s) == (9, 0.0015, 0.00025)
    assert not result.vectors.flags.writeable


def test_an_answer_without_outputs_is_no_answer():
    with pytest.raises(InternalError, match="no output"):
        EmbedResult.from_message(pb.EmbedResponse())


def test_a_connections_fault_is_not_its_requests():
    def told(error):
        return connection_error(error_to_proto(error).SerializeToString())

    assert type(told(InvalidInput("frame version 9"))) is Unavailable
    assert "frame version 9" in told(InvalidInput("frame version 9")).message
    overloaded = told(Overloaded("1024 connections", retry_after_s=1.0))
    assert (type(overloaded), overloaded.retry_after_s) == (Overloaded, 1.0)


def test_an_error_frame_that_is_no_error():
    assert type(parse_error(b"\xff")) is InternalError


def test_token_types_and_spans_lie_beside_the_ids():
    request = embed_request(
        [[1, 2, 3], [4]],
        token_types=[[0, 0, 1], np.array([1], dtype=np.int64)],
        spans=[[(0, 2), (2, 3)], np.empty((0, 2), dtype=np.int32)],
    )
    assert np.frombuffer(request.token_types, "<i4").tolist() == [0, 0, 1, 1]
    assert list(request.spans.counts) == [2, 0]
    assert np.frombuffer(request.spans.bounds, "<i4").tolist() == [0, 2, 2, 3]
    plain = embed_request([[1]])
    assert plain.token_types == b""
    assert not plain.HasField("spans")


@pytest.mark.parametrize(
    ("fields", "words", "index"),
    [
        ({"token_types": [[0, 1], [1, 1]]}, "item 1 has 1 ids and types of int32 and shape \\(2,\\)", 1),
        ({"token_types": [[0, 1]]}, "for 1 of 2 sequences", None),
        ({"token_types": [[0, 1.5], [0]]}, "token types are a list of integers", 0),
        ({"token_types": [[0, -1], [0]]}, "token type -1 at position 1 is negative", 0),
        ({"spans": [[(0, 1)]]}, "spans for 1 of 2 sequences", None),
        ({"spans": [[], [(0, 2)]]}, r"span 0 of item 1 is 0\.\.2: .* <= 1", 1),
        ({"spans": [[(0, 1, 2)], []]}, "pairs of integers", 0),
        ({"spans": [[], [(0, 1), (1,)]]}, "pairs of integers", 1),
        ({"spans": [[(0.0, 1.0)], []]}, "pairs of integers", 0),
        ({"spans": [[(0, 2**31)], []]}, "outside the range of int32", 0),
    ],
)
def test_types_and_spans_that_do_not_fit_are_named_before_they_are_sent(fields, words, index):
    with pytest.raises(InvalidInput, match=words) as caught:
        embed_request([[1, 2], [3]], **fields)
    assert (caught.value.param, caught.value.index) == (next(iter(fields)), index)


def test_items_of_outputs_with_and_without_splits():
    message = pb.EmbedResponse(prompt_tokens=3)
    message.outputs.add(name="dense", values=tensor_to_proto(np.array([[1], [2]], dtype=np.float32)))
    spans = tensor_to_proto(np.array([[3], [4], [5]], dtype=np.float32))
    message.outputs.add(name="chunks", values=spans, splits=[0, 0, 3])
    message.outputs.add(name="none", values=tensor_to_proto(np.empty((0, 1), dtype=np.int8)), splits=[0, 0, 0])
    result = EmbedResult.from_message(message)
    assert result.item("dense", 1).tolist() == [2]
    assert result.item("chunks", 0).shape == (0, 1)
    assert result.item("chunks", 1).tolist() == [[3], [4], [5]]
    assert result.item("none", 1).shape == (0, 1)
