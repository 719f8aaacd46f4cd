"""4-bit blocks become the numbers they stand for, and a file that is not whole is refused by name."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from rose.errors import PullError
from rose.hub.e5s1 import E5S1File
from tests.support.package_formats import e5s1, q4_0

SIZES = (32, 1, 2, 64, 5, 4, 2)


def container(**tensors: tuple[int, int, bytes]) -> E5S1File:
    return E5S1File(e5s1(SIZES, tensors))


def test_the_header_under_the_names_of_config_json():
    sizes = container().sizes
    assert (sizes.hidden_size, sizes.num_hidden_layers, sizes.num_attention_heads) == (32, 1, 2)
    assert (sizes.intermediate_size, sizes.vocab_size) == (64, 5)
    assert (sizes.max_position_embeddings, sizes.type_vocab_size) == (4, 2)
    assert (sizes.bos_token_id, sizes.pad_token_id, sizes.eos_token_id, sizes.unk_token_id) == (0, 1, 2, 3)
    assert sizes.layer_norm_eps == 1e-12  # and not the float32 beside it


def test_every_value_of_a_block_is_its_code_times_the_scale():
    draw = random.Random(0)
    blocks = [([draw.randrange(-8, 8) for _ in range(32)], draw.choice([0.5, -0.013, 1.75, 6e-8])) for _ in range(6)]
    data = b"".join(q4_0(values, scale) for values, scale in blocks)
    found = container(w=(1, 192, data)).tensor("w", (3, 64))
    expected = [value * np.float32(np.float16(scale)) for values, scale in blocks for value in values]
    assert found.dtype == np.float32
    assert found.shape == (3, 64)
    assert found.ravel().tolist() == np.array(expected, np.float32).tolist()  # exact: 11 bits times 4


def test_fp32_passes_through():
    values = np.array([1.5, -2.25, 1e-30, 3.0], "<f4")
    assert np.array_equal(container(b=(0, 4, values.tobytes())).tensor("b", (2, 2)), values.reshape(2, 2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (e5s1(SIZES, {}, magic=b"E5S2"), "no E5S1 container: it starts with b'E5S2'"),
        (e5s1(SIZES, {}, version=2), "version 2, and only version 1"),
        (e5s1(SIZES, {}, block=64), "blocks of 64 values"),
        (e5s1(SIZES, {})[:20], "ends early, after 20 bytes"),
        (e5s1(SIZES, {"w": (2, 4, bytes(16))}), "'w' .* is of kind 2"),
        (e5s1(SIZES, {"w": (0, 4, bytes(12))}), "'w' .*12 bytes for 4 values"),
        (e5s1(SIZES, {"w": (1, 33, bytes(18))}), "'w' .*18 bytes for 33 values"),
        (e5s1(SIZES, {"w": (0, 4, bytes(16))})[:-1], "'w' lies beyond the end"),
    ],
)
def test_what_is_not_such_a_file_is_refused(data, message):
    with pytest.raises(PullError, match=message):
        E5S1File(data)


def test_a_tensor_of_another_size_or_name_is_refused():
    found = container(w=(0, 4, struct.pack("<4f", 1, 2, 3, 4)))
    with pytest.raises(PullError, match=r"'w' .* has 4 values, expected \(5,\)"):
        found.tensor("w", (5,))
    with pytest.raises(PullError, match="has no tensor 'v'"):
        found.tensor("v", (4,))
