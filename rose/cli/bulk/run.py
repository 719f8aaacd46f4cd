"""Texts in, rows out: batches of texts, several requests under way, answers written in order.

Knows the order of things; files, formats and the HTTP API are its neighbours' business.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

from rose.cli.bulk.answers import Answer, join_answers, read_answer
from rose.cli.bulk.api import Api
from rose.cli.bulk.forms import Form
from rose.cli.bulk.resume import Done, ItemDigest
from rose.cli.bulk.source import Item, Source
from rose.errors import InvalidInput, PayloadTooLarge, RoseError, from_kind

# One request: enough for a full batch of the engine, little enough to lose when a run is interrupted.
BATCH_ITEMS = 128
BATCH_CHARS = 65_536
IN_FLIGHT = 4
# What a route's messages tell to send, and what a command line has for it.
_SPELLED = {"send truncate=true": "use --truncate"}
T = TypeVar("T")
Ask = Callable[[Sequence[Item]], Answer]
Advance = Callable[[int, int], None]  # rows and tokens done so far


class Sink(Protocol):
    """Where rows go."""

    done: Done

    def append(self, data: bytes, done: Done) -> None: ...


class StandardOutput:
    """Rows to standard output; nothing to go on with."""

    def __init__(self) -> None:
        self.done = Done()

    def append(self, data: bytes, done: Done) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        self.done = done


def embed_with(api: Api, source: Source, fields: dict[str, object]) -> Ask:
    """One request, cut in halves where the server finds it too large; errors name the line.

    Args:
        fields: of the request's body, besides `input`.
    """

    def send(items: Sequence[Item]) -> Answer:
        return read_answer(api.post("/v1/embeddings", {"input": [item.text for item in items], **fields}), len(items))

    return in_halves(send, join_answers, source)


def in_halves(
    send: Callable[[Sequence[Item]], T], join: Callable[[Sequence[T]], T], source: Source
) -> Callable[[Sequence[Item]], T]:
    """`send`, once more for each half where the server finds the whole too large; errors name the line.

    Args:
        join: answers of consecutive items as one.
    """

    def ask(items: Sequence[Item]) -> T:
        try:
            return send(items)
        except PayloadTooLarge as error:
            if len(items) == 1:
                raise located(error, source, items) from None
        except RoseError as error:
            raise located(error, source, items) from None
        half = len(items) // 2
        return join([ask(items[:half]), ask(items[half:])])

    return ask


def located(error: RoseError, source: Source, items: Sequence[Item]) -> RoseError:
    """The error with the place of the item it is about, and with this command's options for the route's fields."""
    message = error.message
    for field, option in _SPELLED.items():
        message = message.replace(field, option)
    index = error.index or 0
    known = error.index is not None or len(items) == 1
    if error.param not in ("input", "documents", None) or not known or index >= len(items):
        return from_kind(error.kind, message, param=error.param, index=error.index, retry_after_s=error.retry_after_s)
    return from_kind(error.kind, f"{source.where(items[index].number)}: {message}", param=error.param)


def embed_all(source: Source, ask: Ask, form: Form, sink: Sink, advance: Advance) -> str | None:
    """Every text of the source that the sink does not have yet. Returns the name of the prompt that was applied.

    Raises:
        RoseError: at the first item that cannot be embedded; what comes before it is in the sink.
    """
    digest = ItemDigest()
    items = source.items()
    _skip(items, sink.done, digest)
    rows, tokens, prompt = sink.done.rows, sink.done.tokens, None
    advance(rows, tokens)
    for batch, answer in in_order(ask, batches(items)):
        data = form.start(batch, answer) if rows == 0 else b""
        data += form.rows(rows, batch, answer)
        for item in batch:
            digest.add(item.id, item.text)
        rows, tokens, prompt = rows + len(batch), tokens + answer.tokens, answer.prompt
        sink.append(data, Done(rows, 0, digest.value(), tokens))
        advance(rows, tokens)
    if rows == 0:
        raise source.empty()
    return prompt


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Runs of consecutive items, of BATCH_ITEMS items and BATCH_CHARS characters at most; a longer one goes alone.

    What comes before an item that cannot be read is handed out before the error is.
    """
    batch: list[Item] = []
    chars = 0
    try:
        for item in items:
            if batch and (len(batch) == BATCH_ITEMS or chars + len(item.text) > BATCH_CHARS):
                yield batch
                batch, chars = [], 0
            batch.append(item)
            chars += len(item.text)
    except InvalidInput:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def in_order(ask: Callable[[Sequence[Item]], T], parts: Iterator[list[Item]]) -> Iterator[tuple[list[Item], T]]:
    """Each part with its answer, in order, IN_FLIGHT of them under way at a time."""
    pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="rose-embed")
    waiting: deque[tuple[list[Item], Future[T]]] = deque()
    failed: InvalidInput | None = None
    try:
        while True:
            try:
                while failed is None and len(waiting) < IN_FLIGHT and (part := next(parts, None)) is not None:
                    waiting.append((part, pool.submit(ask, part)))
            except InvalidInput as error:
                failed = error  # told once what came before it is written
            if not waiting:
                break
            part, answer = waiting.popleft()
            yield part, answer.result()
        if failed is not None:
            raise failed
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _skip(items: Iterator[Item], done: Done, digest: ItemDigest) -> None:
    """Past what an earlier run has done, if it is still the same.

    Raises:
        InvalidInput: texts or ids before that place have changed, or are fewer.
    """
    found = 0
    for item in islice(items, done.rows):
        digest.add(item.id, item.text)
        found += 1
    if found != done.rows or (done.rows and digest.value() != done.digest):
        raise InvalidInput(
            f"the first {done.rows} texts, or their ids, are not those of the run that was interrupted; "
            "--restart begins anew"
        )
