"""Tensors of a GGUF file by hand: blocks, shapes and places; what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import PullError
from rose.hub.gguf_tensors import GgufFile
from tests.support.package_formats import gguf_with_tensors, q4_1, q8_0

PAIRS = {"general.architecture": (8, "llama")}
NIBBLES = [[(3 * i + b) % 16 for i in range(32)] for b in range(4)]
BYTES = [[(7 * i - 100 + b) % 256 - 128 for i in range(32)] for b in range(2)]
TENSORS = {
    "plain": (0, [2, 3], np.arange(6, dtype="<f4").tobytes()),
    "halves": (1, [3], np.array([0.5, -2, 65504], "<f2").tobytes()),
    "q4": (3, [2, 64], b"".join(q4_1(block, 0.25 * (b + 1), -1.5) for b, block in enumerate(NIBBLES))),
    "q8": (8, [1, 64], b"".join(q8_0(block, 0.125) for block in BYTES)),
}


def test_every_format():
    file = GgufFile(gguf_with_tensors(PAIRS, TENSORS))
    assert file.metadata == {"general.architecture": "llama"}
    assert file.names == tuple(TENSORS)
    assert file.tensor("plain", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensor("halves", (3,)).tolist() == [0.5, -2, 65504]
    expected = np.concatenate([0.25 * (b + 1) * np.array(block) - 1.5 for b, block in enumerate(NIBBLES)])
    assert file.tensor("q4", (2, 64)).tolist() == expected.reshape(2, 64).tolist()
    assert file.tensor("q8", (1, 64))[0].tolist() == (0.125 * np.array(BYTES).reshape(-1)).tolist()
    assert all(file.tensor(name, tuple(shape)).dtype == np.float32 for name, (_, shape, _) in TENSORS.items())


def test_data_begins_where_the_files_alignment_says():
    pairs = PAIRS | {"general.alignment": (4, 256)}
    file = GgufFile(gguf_with_tensors(pairs, TENSORS, alignment=256))
    assert file.tensor("halves", (3,)).tolist() == [0.5, -2, 65504]


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("other", (2, 3), "no tensor 'other'"),
        ("plain", (3, 2), r"'plain' of the GGUF file has shape \(2, 3\), expected \(3, 2\)"),
        ("odd", (3,), r"'odd' of the GGUF file is of type 12; there are \[0, 1, 3, 8\]"),
        ("torn", (1, 33), "'torn' of the GGUF file does not fit into it"),
        ("cut", (64,), "'cut' of the GGUF file does not fit into it"),
    ],
)
def test_refused_by_name(name, shape, words):
    further = {"odd": (12, [3], b""), "torn": (8, [1, 33], bytes(68)), "cut": (0, [64], bytes(12))}
    file = GgufFile(gguf_with_tensors(PAIRS, TENSORS | further))
    with pytest.raises(PullError, match=words):
        file.tensor(name, shape)


def test_a_missing_key_is_named():
    with pytest.raises(PullError, match=r"the GGUF file has no llama\.block_count"):
        GgufFile(gguf_with_tensors(PAIRS, {})).key("llama.block_count")


def test_cut_in_the_table_of_tensors():
    whole = gguf_with_tensors(PAIRS, TENSORS)
    start = whole.index(b"plain") - 8
    for end in range(start, whole.index(b"q8") + 20, 5):
        with pytest.raises(PullError, match=f"ends early, after {end} bytes"):
            GgufFile(whole[:end])
