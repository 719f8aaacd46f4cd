"""Addresses as people write them."""

from __future__ import annotations

import pytest

from rose.errors import InvalidInput
from rose.proto.address import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address(host="127.0.0.1", port=0)),
        ("example.org:65535", Address(host="example.org", port=65535)),
        ("[::1]:80", Address(host="::1", port=80)),
        ("unix:/run/rose.sock", Address(path="/run/rose.sock")),
        ("unix:rose.sock", Address(path="rose.sock")),
    ],
)
def test_parsed_and_spelled_again(text, address):
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "localhost", ":80", "host:", "host:65536", "host:-1", "host:٣", "host:http", "unix:", "unix:" + "x" * 108],
)
def test_refused(text):
    with pytest.raises(InvalidInput) as caught:
        parse_address(text)
    assert caught.value.param == "address"
