"""The head of an answer travels with what follows it, and nothing is ever held back for good."""

from __future__ import annotations

import socket

import pytest

from rose.gateway.one_write import Joining

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Recording:
    def __init__(self):
        self.written, self.closed = [], False
        self.is_closing = lambda: self.closed
        self.resume_reading = lambda: None

    def write(self, data):
        self.written.append(bytes(data))

    def close(self):
        self.closed = True

    def get_extra_info(self, name):
        return f"the {name}"


@pytest.fixture
def inner():
    return Recording()


def test_a_head_waits_for_its_body(inner):
    joining = Joining(inner)
    joining.write(HEAD)
    assert inner.written == []
    joining.write(b"{}")
    joining.write(b"more")
    joining.write(HEAD)
    joining.write(b"[]")
    assert inner.written == [HEAD + b"{}", b"more", HEAD + b"[]"]


def test_a_head_without_body_leaves_with_the_empty_write_or_the_end(inner):
    joining = Joining(inner)
    joining.write(HEAD)
    joining.write(b"")
    assert inner.written == [HEAD]
    joining.write(HEAD)
    joining.close()
    assert inner.written == [HEAD, HEAD]
    assert inner.closed


def test_whole_answers_and_interim_ones_do_not_wait(inner):
    joining = Joining(inner)
    whole = HEAD + b"{}"
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    event = b"2a\r\ndata: {}\n\n\r\n\r\n"
    for data in (whole, interim, event):
        joining.write(data)
    assert inner.written == [whole, interim, event]


def test_everything_else_is_the_transports_own(inner):
    joining = Joining(inner)
    assert joining.get_extra_info("peername") == "the peername"
    assert not joining.is_closing()
    with pytest.raises(AttributeError, match="no_such"):
        joining.no_such  # noqa: B018


@pytest.mark.parametrize("request_line", [b"HEAD /health", b"GET /health", b"GET /nowhere", b"POST /health"])
def test_answers_without_much_of_a_body_arrive(shared, request_line):
    host, _, port = shared.listening.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request_line + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := connection.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 ")
    assert (body == b"") == request_line.startswith(b"HEAD")


def test_an_answer_is_one_packet(shared):
    """Over loopback a write of this size is read as a whole; before, the head could be read alone."""
    host, _, port = shared.listening.http.rpartition(":")
    body = b'{"input":[[5,6,7]],"encoding_format":"base64"}'
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for _ in range(20):
            connection.sendall(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"}"), answer
