"""Every type of a GGUF file's key-value part comes back as it was written; what is cut off is refused."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import PullError
from rose.hub.gguf import read_metadata
from tests.support.package_formats import gguf

PAIRS = {
    "u8": (0, 200),
    "i8": (1, -100),
    "u16": (2, 60_000),
    "i16": (3, -30_000),
    "u32": (4, 4_000_000_000),
    "i32": (5, -2_000_000_000),
    "f32": (6, 1.5),
    "yes": (7, True),
    "text": (8, "Grüße ▁ 你好"),
    "raw": (8, b"\xff\xfe"),
    "texts": (9, (8, ["a", "", "b c"])),
    "scores": (9, (6, [0.0, -1.25, -3.5])),
    "bytes": (9, (0, [1, 2, 255])),
    "nested": (9, (9, [(4, [1, 2]), (4, [])])),
    "u64": (10, 2**63 + 1),
    "i64": (11, -(2**62)),
    "f64": (12, 0.1),
}


@pytest.mark.parametrize("version", [2, 3])
def test_every_type(version):
    found = read_metadata(gguf(PAIRS, version=version))
    assert list(found) == list(PAIRS)
    for name, (kind, value) in PAIRS.items():
        if kind != 9:
            assert found[name] == value, name
    assert found["texts"] == ["a", "", "b c"]
    assert found["scores"].tolist() == [0.0, -1.25, -3.5]
    assert found["bytes"].dtype == np.uint8
    assert found["bytes"].tobytes() == b"\x01\x02\xff"
    assert [item.tolist() for item in found["nested"]] == [[1, 2], []]


def test_another_file_or_version_is_refused():
    with pytest.raises(PullError, match="no GGUF file: it starts with b'GGML'"):
        read_metadata(gguf({}, magic=b"GGML"))
    with pytest.raises(PullError, match="version 1, and only versions 2 and 3"):
        read_metadata(gguf({}, version=1))
    with pytest.raises(PullError, match="type 77"):
        read_metadata(gguf({})[:16] + b"\x01" + bytes(7) + b"\x01" + bytes(7) + b"k" + b"\x4d\0\0\0" + bytes(8))


def test_cut_anywhere_it_is_refused_and_never_read_as_less():
    whole = gguf(PAIRS)
    for end in range(24, len(whole), 7):
        with pytest.raises(PullError, match=f"ends early, after {end} bytes"):
            read_metadata(whole[:end])
