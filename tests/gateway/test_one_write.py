"""The head of an answer travels with what follows it, and nothing is ever held back for good."""

from __future__ import annotations

import asyncio
import http.client
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


def joining(work):
    """What was written while `work` had a joining transport, in a running loop."""
    inner = Recording()

    async def main():
        found = work(Joining(inner), inner)
        if found is not None:
            await found

    asyncio.run(main())
    return inner.written


def test_a_head_waits_for_its_body():
    def work(transport, inner):
        transport.write(HEAD)
        assert inner.written == []
        transport.write(b"{}")
        transport.write(b"more")
        transport.write(HEAD)
        transport.write(b"[]")

    assert joining(work) == [HEAD + b"{}", b"more", HEAD + b"[]"]


def test_a_head_that_nothing_follows_leaves_when_the_turn_ends():
    async def work(transport, inner):
        transport.write(HEAD)
        await asyncio.sleep(0)
        assert inner.written == [HEAD]
        transport.write(b"{}")

    assert joining(work) == [HEAD, b"{}"]


def test_a_head_leaves_before_its_connection_closes():
    def work(transport, inner):
        transport.write(HEAD)
        transport.close()
        assert (inner.written, inner.closed) == ([HEAD], True)

    assert joining(work) == [HEAD]


def test_whole_answers_and_interim_ones_do_not_wait():
    parts = [HEAD + b"{}", b"HTTP/1.1 100 Continue\r\n\r\n", b"2a\r\ndata: {}\n\n\r\n\r\n"]

    def work(transport, inner):
        for n, data in enumerate(parts, 1):
            transport.write(data)
            assert len(inner.written) == n

    assert joining(work) == parts


def test_everything_else_is_the_transports_own():
    def work(transport, inner):
        assert transport.get_extra_info("peername") == "the peername"
        assert not transport.is_closing()
        with pytest.raises(AttributeError, match="no_such"):
            transport.no_such  # noqa: B018

    assert joining(work) == []


@pytest.mark.parametrize("request_line", [b"HEAD /health", b"GET /health", b"GET /nowhere", b"POST /health"])
@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_answers_without_much_of_a_body_arrive(shared, request_line, connection):
    host, _, port = shared.listening.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as caller:
        caller.sendall(
            request_line + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: " + connection + b"\r\n\r\n"
        )
        answer = http.client.HTTPResponse(caller, method=request_line.split()[0].decode())
        answer.begin()
        body = answer.read()
    assert answer.status in (200, 404, 405)
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
