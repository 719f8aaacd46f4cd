"""Vectors in JSON: short numbers that are still the same float32, and base64 that clients decode as little-endian."""

from __future__ import annotations

import array
import asyncio
import base64
import json
import sys

import numpy as np
import pytest

from rose.errors import InvalidInput
from rose.gateway.vectors import SLICE, check_format, check_quantised_dimensions, cut_quantised, embedding_list
from rose.proto import rose_pb2 as pb


def encoded(vectors, encoding):
    return json.loads(b"[" + asyncio.run(embedding_list(vectors, encoding)) + b"]")


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
    text = asyncio.run(embedding_list(unit_rows(1, 1024), "float"))
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
        await embedding_list(unit_rows(64, 1024), "float")
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


def test_formats():
    assert check_format(None, PLAIN) == "float"
    assert check_format("base64", PLAIN) == "base64"
    assert check_format("base64_int8", QUANTISED) == "base64_int8"
    for name in ("bytes", "base64_int8", "base64_binary", ""):
        with pytest.raises(InvalidInput, match=r"expected one of float, base64$") as refused:
            check_format(name, PLAIN)
        assert refused.value.param == "encoding_format"
    uneven = pb.ModelCard(outputs=[pb.OutputCard(name="binary", unavailable="uneven")])
    with pytest.raises(InvalidInput):
        check_format("base64_binary", uneven)


@pytest.mark.parametrize(
    ("encoding", "good", "bad"),
    [("base64_int8", (0, 1, 63, 64), (65, 2**70)), ("base64_binary", (0, 8, 64), (1, 12, 72))],
)
def test_dimensions_of_quantised_vectors(encoding, good, bad):
    for dimensions in good:
        check_quantised_dimensions(dimensions, encoding, QUANTISED)
    for dimensions in bad:
        with pytest.raises(InvalidInput, match=r"up to 64|1\.\.64") as refused:
            check_quantised_dimensions(dimensions, encoding, QUANTISED)
        assert refused.value.param == "dimensions"


def test_quantised_vectors_travel_as_their_own_bytes():
    signed = np.array([[-127, 0, 127, 5]], dtype=np.int8)
    raw = base64.b64decode(encoded(cut_quantised(signed, 3, "base64_int8"), "base64_int8")[0]["embedding"])
    assert np.frombuffer(raw, np.int8).tolist() == [-127, 0, 127]
    x = np.random.default_rng(0).standard_normal((2, 64))
    bits = np.packbits(x >= 0, axis=1, bitorder="little")
    for item, row in zip(encoded(cut_quantised(bits, 24, "base64_binary"), "base64_binary"), x, strict=True):
        raw = np.frombuffer(base64.b64decode(item["embedding"]), np.uint8)
        assert np.unpackbits(raw, bitorder="little").tolist() == (row[:24] >= 0).astype(int).tolist()
