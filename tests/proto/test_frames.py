"""Frames: whatever the cuts, whatever the garbage."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import InvalidInput, PayloadTooLarge
from rose.proto.frames import (
    HEADER_BYTES,
    MAX_DEADLINE_MS,
    Frame,
    FrameDecoder,
    FrameType,
    deadline_to_ms,
    encode_frame,
)

frames = st.builds(
    Frame,
    type=st.sampled_from(FrameType),
    request_id=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=200),
    deadline_ms=st.integers(0, MAX_DEADLINE_MS),
)


def encode(frame: Frame) -> bytes:
    return encode_frame(frame.type, frame.request_id, frame.payload, frame.deadline_ms)


def test_header_bytes_are_as_documented():
    assert encode_frame(FrameType.EMBED, 7, b"ab", 1500) == struct.pack("<IBBHQI", 2, 1, 1, 0, 7, 1500) + b"ab"
    assert HEADER_BYTES == 20


@given(st.lists(frames, max_size=8), st.data())
def test_any_cuts_give_the_same_frames(sent, data):
    stream = b"".join(encode(frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])
    assert received == sent
    assert decoder.pending_bytes == 0


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_a_mutated_stream_gives_frames_or_a_named_error(sent, data):
    stream = bytearray(b"".join(encode(frame) for frame in sent))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    decoder = FrameDecoder(max_payload=1 << 16)
    with contextlib.suppress(InvalidInput, PayloadTooLarge):
        for start in range(0, len(stream), 7):
            for frame in decoder.feed(stream[start : start + 7]):
                assert isinstance(frame.type, FrameType)


@given(st.binary(max_size=400))
def test_garbage_gives_frames_or_a_named_error(garbage):
    with contextlib.suppress(InvalidInput, PayloadTooLarge):
        for frame in FrameDecoder(max_payload=1 << 16).feed(garbage):
            assert encode(frame) in garbage


@pytest.mark.parametrize(
    ("header", "error", "words"),
    [
        (struct.pack("<IBBHQI", 0, 2, 1, 0, 1, 0), InvalidInput, "version 2"),
        (struct.pack("<IBBHQI", 0, 1, 99, 0, 1, 0), InvalidInput, "type 99"),
        (struct.pack("<IBBHQI", 0, 1, 1, 1, 1, 0), InvalidInput, "reserved"),
        (struct.pack("<IBBHQI", 1025, 1, 1, 0, 1, 0), PayloadTooLarge, "1025 bytes is over the limit of 1024"),
    ],
)
def test_broken_headers_are_refused_before_their_payload(header, error, words):
    with pytest.raises(error, match=words):
        FrameDecoder(max_payload=1024).feed(header)


def test_a_payload_of_exactly_the_limit_passes_and_one_byte_more_does_not():
    decoder = FrameDecoder(max_payload=1024)
    assert decoder.feed(encode_frame(FrameType.EMBED, 1, b"x" * 1024))[0].payload == b"x" * 1024
    with pytest.raises(PayloadTooLarge):
        decoder.feed(encode_frame(FrameType.EMBED, 1, b"x" * 1025))


def test_payloads_do_not_share_memory_with_the_read_buffer():
    buffer = bytearray(encode_frame(FrameType.EMBED, 1, b"abc"))
    (frame,) = FrameDecoder().feed(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert frame.payload == b"abc"


def test_deadlines_in_milliseconds():
    assert deadline_to_ms(None) == 0
    assert deadline_to_ms(1e-9) == 1
    assert deadline_to_ms(0.0011) == 2
    assert all(deadline_to_ms(clock + 0.15 - clock) == 150 for clock in (17.3, 12345.678, 98765432.1))
    assert deadline_to_ms(1e12) == MAX_DEADLINE_MS
    assert deadline_to_ms(float("inf")) == MAX_DEADLINE_MS
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidInput, match="positive"):
            deadline_to_ms(bad)
