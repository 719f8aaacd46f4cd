"""Vectors in JSON: short numbers that are still the same float32, and base64 that clients decode as little-endian."""

from __future__ import annotations

import array
import asyncio
import base64
import json
import sys
import time

import numpy as np
import pytest

from rose.client import EmbedResult, Timing
from rose.errors import InvalidInput
from rose.gateway.forms import vector_form
from rose.gateway.named_outputs import Named, named_list
from rose.gateway.service import Embedded
from rose.gateway.vectors import SLICE, embedding_list, joined
from rose.proto import rose_pb2 as pb


def encoded(vectors, encoding):
    """The items of vectors that need no quantising."""
    form = vector_form(PLAIN, encoding, None)
    items = embedding_list(form.apply(vectors, 0), as_base64=form.base64, fields=form.fields())
    return json.loads(b"[" + asyncio.run(items) + b"]")


def unit_rows(rows, dimension, seed=0):
    made = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-8, 1e-3, 1e5, 1e30])
def test_numbers_read_back_as_the_very_same_float32(scale):
    vectors = unit_rows(3, 500) * np.float32(scale)
    vectors[0, :3] = (0.0, -0.0, np.float32(1.0))
    read = np.array([item["embedding"] for item in encoded(vectors, "float")], dtype=np.float32)
    assert np.array_equal(read, vectors)


def test_numbers_of_unit_vectors_are_short():
    text = asyncio.run(embedding_list(unit_rows(1, 1024), as_base64=False))
    assert len(text) < 15 * 1024  # a double of each float32 in full would take 21 bytes


def test_base64_is_little_endian_float32_as_clients_decode_it():
    """Reports C65 (vllm#5734, llama.cpp#10887) and C68 (vllm#26248): the byte order is stated, not the machine's."""
    vectors = unit_rows(2, 7)
    for item, row in zip(encoded(vectors, "base64"), vectors, strict=True):
        raw = base64.b64decode(item["embedding"])
        assert np.array_equal(np.frombuffer(raw, dtype="<f4"), row)
        swapped = array.array("f", raw)
        if sys.byteorder == "big":
            swapped.byteswap()
        assert swapped.tolist() == row.tolist()
        assert not np.array_equal(np.frombuffer(raw, dtype=">f4"), row)


def test_integer_vectors_stay_integers_in_json_and_become_float32_in_base64():
    vectors = np.array([[-127, 0, 127]], dtype=np.int8)
    assert encoded(vectors, "float")[0]["embedding"] == [-127, 0, 127]
    assert np.frombuffer(base64.b64decode(encoded(vectors, "base64")[0]["embedding"]), "<f4").tolist() == [-127, 0, 127]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_answers_larger_than_a_slice_keep_index_and_order(encoding):
    vectors = unit_rows(SLICE // 100 + 50, 100)
    items = encoded(vectors, encoding)
    assert [item["index"] for item in items] == list(range(len(vectors)))
    assert items == [{**one, "index": i} for i, row in enumerate(vectors) for one in encoded(row[None], encoding)]


def test_other_requests_get_their_turn_while_a_large_answer_is_encoded():
    async def turns() -> int:
        count, done = 0, False

        async def other() -> None:
            nonlocal count
            while not done:
                count += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await embedding_list(unit_rows(64, 1024), as_base64=False)
        done = True
        await task
        return count

    assert asyncio.run(turns()) >= 4


PLAIN = pb.ModelCard(outputs=[pb.OutputCard(name="dense", dtype=pb.FLOAT32, dimension=64)])
QUANTISED = pb.ModelCard(
    outputs=[
        *PLAIN.outputs,
        pb.OutputCard(name="int8", dtype=pb.INT8, dimension=64),
        pb.OutputCard(name="binary", dtype=pb.UINT8, dimension=8),
    ]
)


def sent(card, rows, encoding=None, dtype=None, dimensions=0):
    """The items of rows of the form's source, as clients read them."""
    form = vector_form(card, encoding, dtype)
    form.check(dimensions)
    items = embedding_list(form.apply(rows, dimensions), as_base64=form.base64, fields=form.fields())
    return json.loads(b"[" + asyncio.run(items) + b"]")


def test_encodings_that_there_are():
    for name in (None, "float", "base64"):
        assert vector_form(PLAIN, name, None).source == "dense"
    assert vector_form(QUANTISED, "base64_int8", None).source == "int8"
    for name in ("bytes", "base64_int8", "base64_binary", ""):
        with pytest.raises(InvalidInput, match=r"expected one of float, base64$") as refused:
            vector_form(PLAIN, name, None)
        assert refused.value.param == "encoding_format"
    uneven = pb.ModelCard(outputs=[pb.OutputCard(name="binary", unavailable="uneven")])
    with pytest.raises(InvalidInput):
        vector_form(uneven, "base64_binary", None)


@pytest.mark.parametrize(
    ("card", "encoding", "dtype", "words"),
    [
        (PLAIN, None, "int8", "no quantiser of its own"),
        (PLAIN, "base64", "uint8", "no quantiser of its own"),
        (PLAIN, None, "float16", "expected one of float, int8, uint8, binary, ubinary"),
        (PLAIN, None, "", "expected one of"),
        (QUANTISED, "base64_int8", "ubinary", "send one of both"),
        (QUANTISED, "base64_binary", "int8", "send one of both"),
    ],
)
def test_dtypes_that_cannot_be_had_are_refused_with_the_reason(card, encoding, dtype, words):
    with pytest.raises(InvalidInput, match=words) as refused:
        vector_form(card, encoding, dtype)
    assert refused.value.param == "output_dtype"


@pytest.mark.parametrize(
    ("encoding", "dtype", "good", "bad"),
    [
        ("base64_int8", None, (0, 1, 63, 64), (65, 2**70, -1)),
        ("base64_binary", None, (0, 8, 64), (1, 12, 72)),
        ("float", "uint8", (0, 1, 64), (65,)),
        ("float", "ubinary", (0, 8, 64), (1, 12, 72)),
        ("base64", "binary", (0, 8, 64), (1, 63)),
        ("float", None, (0, 1, 64), (65,)),
    ],
)
def test_dimensions_of_each_form(encoding, dtype, good, bad):
    form = vector_form(QUANTISED, encoding, dtype)
    for dimensions in good:
        form.check(dimensions)
    for dimensions in bad:
        with pytest.raises(InvalidInput, match=r"up to 64|1\.\.64") as refused:
            form.check(dimensions)
        assert refused.value.param == "dimensions"


def test_bits_of_a_vector_that_fills_no_byte_are_refused():
    card = pb.ModelCard(outputs=[pb.OutputCard(name="dense", dtype=pb.FLOAT32, dimension=60)])
    with pytest.raises(InvalidInput, match="dimensions of 60: a multiple of 8"):
        vector_form(card, None, "ubinary").check(0)


def test_quantised_vectors_travel_as_their_own_bytes():
    signed = np.array([[-127, 0, 127, 5]], dtype=np.int8)
    (item,) = sent(QUANTISED, signed, "base64_int8", dimensions=3)
    assert np.frombuffer(base64.b64decode(item["embedding"]), np.int8).tolist() == [-127, 0, 127]
    assert item["dtype"] == "int8"
    x = np.random.default_rng(0).standard_normal((2, 64))
    bits = np.packbits(x >= 0, axis=1, bitorder="little")
    for item, row in zip(sent(QUANTISED, bits, "base64_binary", dimensions=24), x, strict=True):
        raw = np.frombuffer(base64.b64decode(item["embedding"]), np.uint8)
        assert np.unpackbits(raw, bitorder="little").tolist() == (row[:24] >= 0).astype(int).tolist()
        assert (item["dtype"], item["bit_order"]) == ("binary", "lsb")


def test_signed_bytes_become_unsigned_ones_by_their_offset():
    signed = np.array([[-128, -127, 0, 127]], dtype=np.int8)
    (listed,), (packed,) = sent(QUANTISED, signed, dtype="uint8"), sent(QUANTISED, signed, "base64", "uint8")
    assert listed == {"object": "embedding", "index": 0, "embedding": [0, 1, 128, 255], "dtype": "uint8"}
    assert list(base64.b64decode(packed["embedding"])) == [0, 1, 128, 255]


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_bits_are_those_of_sentence_transformers(dtype):
    from sentence_transformers.util import quantize_embeddings

    x = unit_rows(5, 64)
    x[0, :9] = 0.0  # zero is not above zero
    expected = quantize_embeddings(x, precision=dtype)
    listed = sent(PLAIN, x, dtype=dtype)
    assert np.array_equal([item["embedding"] for item in listed], expected)
    assert {(item["dtype"], item["bit_order"]) for item in listed} == {(dtype, "msb")}
    raw = [base64.b64decode(item["embedding"]) for item in sent(PLAIN, x, "base64", dtype)]
    assert np.array_equal([np.frombuffer(row, expected.dtype) for row in raw], expected)


async def _longest_silence(work):
    """What `work` gives, and the longest time in which nothing else on the loop got its turn, in seconds."""
    silence, last = 0.0, time.perf_counter()

    async def watch():
        nonlocal silence, last
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            silence, last = max(silence, now - last), now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    found = await work
    await asyncio.sleep(0.01)
    watching.cancel()
    return found, silence


def test_token_vectors_of_many_texts_do_not_stop_the_loop():
    """Matrices each too small for a slice of their own are 23 MB of JSON in all; nobody waits for the whole of them."""
    items, tokens, width = 1000, 20, 96
    card = pb.OutputCard(name="colbert", dtype=pb.FLOAT32, dimension=width, per_token=True, kind="vector")
    rows = unit_rows(items * tokens, width)
    splits = {"colbert": tuple(range(0, items * tokens + 1, tokens))}
    result = EmbedResult({"colbert": rows}, splits, items * tokens, Timing(0.0, 0.0, 1))
    done = Embedded(result, None, [np.zeros(tokens, dtype=np.int32)] * items, items * tokens, 0.0)
    named = Named(("colbert",), "dense", vector_form(PLAIN, None, None), "ids")
    shares = []
    for _ in range(5):
        started = time.perf_counter()
        text, silence = asyncio.run(_longest_silence(named_list(pb.ModelCard(outputs=[card]), named, done, None)))
        shares.append(silence / (time.perf_counter() - started))
    read = json.loads(b"[" + text + b"]")
    assert [item["index"] for item in read] == list(range(items))
    assert np.array_equal(np.array([item["colbert"] for item in read], dtype=np.float32).reshape(-1, width), rows)
    # Made on the loop, it is silent all the time; a busy neighbour lengthens a pause in some of the rounds only.
    assert min(shares) < 0.5, shares


def test_joining_large_pieces_leaves_the_loop_to_others():
    pieces = [b"x" * (1 << 20)] * 64
    silences = []
    for _ in range(5):
        whole, silence = asyncio.run(_longest_silence(joined(pieces)))
        silences.append(silence)
    assert whole == b",".join(pieces)
    assert asyncio.run(joined([b"a", b"b"], b"")) == b"ab"
    assert min(silences) < 0.25
