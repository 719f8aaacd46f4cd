"""Bodies of many megabytes, many of them, and with numbers that Python refuses to read: nobody else notices."""

from __future__ import annotations

import threading
import time

import httpx
import msgspec
import pytest

from rose.errors import InvalidInput, PayloadTooLarge
from rose.gateway.body_budget import BodyBudget, Held
from rose.gateway.inputs import parse_input
from rose.gateway.json_body import check_values, timeout_s
from tests.gateway.conftest import card_for, live_front
from tests.gateway.processes import ports, running, wait_for

MANY = 5_000_000


@pytest.mark.parametrize(
    ("body", "values"),
    [
        (b'{"input":[1,2,3,4]}', 4),
        (b'{"input":[[1,2],[3,4]],"model":"a,b,c,d,e"}', 5),
        (b'{"input":["a,b,c","\\",\\",\\"","\\\\","d"]}', 4),
        (b'["unterminated, and, so, on, and, on', 1),
    ],
)
def test_values_are_counted_by_the_commas_between_them(body, values):
    check_values(body, values - 1)
    if values > 1:
        with pytest.raises(PayloadTooLarge, match=f"more than {values - 2} values"):
            check_values(body, values - 2)


def test_commas_in_texts_are_no_values():
    text = msgspec.json.encode({"input": ["a,b," * 100_000, 'say ",", or "\\"', "c"]})
    check_values(text, 3)
    quotes = b'{"input":"' + b'\\"' * 100_000 + b"," * 5 + b'"}'
    check_values(quotes, 3)


@pytest.mark.parametrize("digits", [5000, 20, 11])
def test_a_deadline_of_thousands_of_digits_is_refused(digits, shared):
    """Python raises ValueError for integers of more than 4300 digits."""
    header = b"9" * digits
    with pytest.raises(InvalidInput, match="expected whole milliseconds") as refused:
        timeout_s(header, 1.0)
    assert len(refused.value.message) < 200
    assert "b'" not in refused.value.message
    answer = shared.client.post(
        "/v1/embeddings", json={"input": [5]}, headers={"X-Request-Timeout-Ms": header.decode()}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout-Ms"


def test_leading_zeros_are_no_digits_that_count():
    assert timeout_s(b"0" * 50 + b"2500", 1.0) == 2.5
    with pytest.raises(InvalidInput):
        timeout_s(b"0" * 50, 1.0)


def test_what_is_quoted_has_an_end_and_is_text(shared):
    for headers in ({"Content-Encoding": "zip"}, {"Content-Encoding": "z" * 5000}):
        error = shared.client.post("/v1/embeddings", content=b"{}", headers=headers).json()["error"]
        assert error["message"].startswith("Content-Encoding 'z")
        assert len(error["message"]) < 200
    refused = shared.embed([5], model="m" * 1_000_000)
    assert refused.status_code == 404
    assert len(refused.content) < 3000


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([0] * 11, "11 token ids in one request, the limit is 10"),
        ([[0] * 6, [0] * 6], "12 token ids in one request, the limit is 10"),
        (["a"] * 5 + [None], "6 items in one request, the limit is 4"),
        ([[0]] * 5 + [None], "6 items in one request, the limit is 4"),
    ],
)
def test_counts_are_checked_before_values(value, words):
    with pytest.raises(PayloadTooLarge, match=words):
        parse_input(value, vocab_size=5, max_items=4, max_ids=10)


def test_what_is_held_is_given_back():
    budget = BodyBudget(100)
    first, second = Held(budget), Held(budget)
    assert first.add(60)
    assert not second.add(41)
    assert second.add(40)
    first.release()
    first.release()
    assert budget.used == 40
    assert second.refusal().retry_after_s


def test_bodies_share_a_budget_and_say_when_to_come_back(text_folder):
    """Two bodies that come slowly fill it; a third is refused meanwhile, and taken once they are done."""
    size = 400_000
    with live_front(text_folder, card_for(text_folder), max_body_bytes=size, max_held_bytes=2 * size) as live:
        body = b'{"input": [5, 6]}'.ljust(size - 1000)
        go = threading.Event()

        def slowly():
            yield body
            go.wait(20)
            yield b" "

        answers = []

        def send():
            answers.append(httpx.post(f"{live.url}/v1/embeddings", content=slowly(), timeout=30).status_code)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        budget = live.front.http._bodies
        wait_for(lambda: budget.used == 2 * len(body))
        refused = live.client.post("/v1/embeddings", content=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert "the limit is 800000 bytes for all" in refused.json()["error"]["message"]
        assert live.embed([5]).status_code == 200  # a small one still fits
        go.set()
        for thread in threads:
            thread.join(30)
        assert answers == [200, 200]
        assert live.client.post("/v1/embeddings", content=body).status_code == 200
        wait_for(lambda: budget.used == 0)


HUGE = {
    "ids": b'{"input":[' + b"1234," * MANY + b"1]}",
    "a million ids": b'{"input":[' + b"5," * 1_000_000 + b"1]}",
    "id lists": b'{"input":[' + b"[5]," * MANY + b"[5]]}",
    "texts": b'{"input":[' + b'"a",' * MANY + b'"a"]}',
    "one text": b'{"input":"' + b"a, " * 9_000_000 + b'"}',
    "no JSON": b'{"input":[' + b'"a",' * MANY,
}


@pytest.mark.parametrize("name", list(HUGE))
def test_a_body_of_many_megabytes_stops_nobody(name, text_folder, tmp_path):
    engine = {"folder": str(text_folder), "pids": str(tmp_path / "pids")}
    with running("serve", folder=str(text_folder), engines=[engine], config={}) as process:
        base = f"http://{ports(process)[0]}"
        with httpx.Client(base_url=base, timeout=30) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)

            def longest_silence() -> float:
                """Seconds that anybody else waited for an answer while the body was read and refused."""
                answers = []
                sender = threading.Thread(
                    target=lambda: answers.append(httpx.post(f"{base}/v1/embeddings", content=HUGE[name], timeout=30))
                )
                sender.start()
                longest = 0.0
                while sender.is_alive():
                    started = time.monotonic()
                    assert client.get("/health").status_code == 200
                    longest = max(longest, time.monotonic() - started)
                sender.join()
                assert answers[0].status_code in (400, 413)
                return longest

            # A body that holds the front up does so every time, a busy machine only now and then.
            assert any(longest_silence() < 0.5 for _ in range(6))
