"""The engine processes behind a front: who is ready, who takes the next part, what happens when one fails.

    parts -> least outstanding tokens -> light link -> rejoined in order

A part whose replica goes away is sent elsewhere within the request's deadline, once: it may be what ended the engine.
Knows token ids and addresses; knows neither text nor the carriers in front.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rose.client import EmbedResult
from rose.errors import DeadlineExceeded, InvalidInput, Overloaded, RoseError, StartupError, Unavailable
from rose.gateway.metrics import Metrics
from rose.gateway.outputs import output_cards
from rose.gateway.parts import Part, at_item, check_answer, cut_parts, join
from rose.gateway.replica import SILENCE_S, CheckCard, ConnectionLost, Replica
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.proto.convert import IntArray

# An engine runs two batches at once; a third part on its way keeps it from waiting for us, more would only queue there.
PARTS_PER_REPLICA = 3
# Below this a request is not spread over idle replicas: a batch of so few tokens does not get faster by halving it.
SPREAD_TOKENS = 4096
# Vectors of every token are cut into answers of about this size: half of what a frame holds by default.
PART_BYTES = 32 << 20
# A part whose connection is lost may have ended the engine: after so many losses no further engine is risked.
MAX_LOSSES = 2
# How long a request that finds no replica ready waits for one more try to reach them: a refused connection is known at
# once, a model card takes milliseconds.
LOOK_S = 0.5
# Where an overloaded replica does not say when to come back.
OVERLOAD_PAUSE_S = 0.1


class ReplicaPool:
    """All replicas of one model.

    Args:
        addresses: light-link addresses.
        check_card: refuses a replica this front cannot serve (raises RoseError).
        names: what the public hears of each; empty for the addresses.
        silence_s, spin_s: see `Replica`.

    Raises:
        StartupError: no address, one that is none, or one twice.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        check_card: CheckCard,
        metrics: Metrics,
        *,
        names: Sequence[str] = (),
        silence_s: float = SILENCE_S,
        spin_s: float = 0.0,
    ) -> None:
        _check_addresses(addresses)
        self.replicas = [
            Replica(address, self._check, name=name, silence_s=silence_s, spin_s=spin_s)
            for address, name in zip(addresses, names or addresses, strict=True)
        ]
        self._check_card = check_card
        self._metrics = metrics
        self._card: pb.ModelCard | None = None
        self._turn = 0

    async def __aenter__(self) -> ReplicaPool:
        for replica in self.replicas:
            replica.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    @property
    def card(self) -> pb.ModelCard:
        """What is served: the card of the replica that was accepted last.

        Raises:
            Unavailable: no replica has been, yet.
        """
        if self._card is None:
            raise Unavailable(f"no replica has come up yet: {self._reasons()}", retry_after_s=1.0)
        return self._card

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready]

    async def look(self) -> None:
        """Where no replica is ready, try to reach them now; to be called before a request is taken.

        A front tries in its own turns, up to a second apart. One of several on a port would refuse what a sibling that
        was a turn ahead has already called ready to the same caller.
        """
        if self.ready:
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + LOOK_S
        looks = {replica.look() for replica in self.replicas}
        while looks and not self.ready:
            done, looks = await asyncio.wait(
                looks, timeout=max(0.0, end - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return

    def require_ready(self) -> list[Replica]:
        """The ready replicas. Raises Unavailable, with every replica's reason, if there is none."""
        ready = self.ready
        if not ready:
            raise self.none_ready()
        return ready

    def none_ready(self) -> Unavailable:
        return Unavailable(f"no replica is ready: {self._reasons()}", retry_after_s=1.0)

    async def embed(
        self,
        sequences: Sequence[IntArray],
        *,
        outputs: Sequence[str] = (),
        dimensions: int = 0,
        priority: pb.Priority.ValueType = pb.ONLINE,
        token_types: Sequence[IntArray] | None = None,
        spans: Sequence[IntArray] | None = None,
        payload: bytes = b"",
        deadline: float,
    ) -> EmbedResult:
        """Run sequences, whatever their number, and give their rows back in order.

        Args:
            token_types: beside the sequences; None for all zero.
            spans: [n, 2] beside each sequence: pooled outputs have a row a span, with splits.
            payload: see `Part`; of no use where the sequences make several parts.
            deadline: loop.time() after which nobody wants the answer.

        Raises:
            RoseError: of the first part that failed for good; its index counts from the request's first item.
        """
        job = _Job(tuple(outputs), dimensions, priority, deadline, {})
        ready = self.require_ready()
        max_tokens, max_items = self._limits(sequences, job.outputs, ready)
        parts = cut_parts(sequences, max_tokens, max_items, token_types=token_types, spans=spans, payload=payload)
        if len(parts) == 1:
            return await self._run(parts[0], job)
        answers: list[EmbedResult | None] = [None] * len(parts)
        waiting = iter(enumerate(parts))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(parts), PARTS_PER_REPLICA * len(ready))):
                    group.create_task(self._work(waiting, job, answers))
        except* RoseError as failed:
            raise _first(failed) from None
        return join([answer for answer in answers if answer is not None])

    async def refresh_stats(self, timeout_s: float) -> None:
        """Ask every ready replica for its counters, for the metrics page."""
        await asyncio.gather(*(replica.refresh_stats(timeout_s) for replica in self.ready))

    async def _work(self, waiting: Iterator[tuple[int, Part]], job: _Job, answers: list[EmbedResult | None]) -> None:
        for index, part in waiting:
            while answers[index] is None:
                try:
                    answers[index] = await self._run(part, job)
                except Overloaded as error:
                    # Once some of a request is computed, refusing the rest would only make the caller ask for all of
                    # it again: its later parts wait for room.
                    if not any(answers):
                        raise
                    await asyncio.sleep(min(error.retry_after_s or OVERLOAD_PAUSE_S, max(0.0, job.left_s())))

    async def _run(self, part: Part, job: _Job) -> EmbedResult:
        """One part, on one replica after another until one answers."""
        tried: list[Replica] = []
        failed: RoseError | None = None
        while True:
            replica = self.choose(tried)
            if replica is None:
                raise failed or self.none_ready()
            left_s = job.left_s()
            if left_s <= 0:
                raise failed or DeadlineExceeded("the deadline passed before the request could be sent to a replica")
            if failed is not None:
                self._metrics.retries.inc()
            tried.append(replica)
            try:
                answer = await replica.embed(
                    part,
                    outputs=job.outputs,
                    dimensions=job.dimensions,
                    priority=job.priority,
                    deadline_s=left_s,
                )
                check_answer(part, answer)
            except ConnectionLost as error:
                failed = error
                lost = job.lost[part.start] = job.lost.get(part.start, 0) + 1
                if lost >= MAX_LOSSES:
                    raise Unavailable(
                        f"the connections to {lost} replicas were lost while they had this request, which is not sent "
                        f"to another one; the last was {error.message}",
                        retry_after_s=1.0,
                    ) from None
            except (Unavailable, Overloaded) as error:
                failed = error
            except RoseError as error:
                raise at_item(error, part.start) from None
            else:
                return answer

    def choose(self, tried: Sequence[Replica]) -> Replica | None:
        """The ready one with the least outstanding tokens, but for those tried; among equals each in turn."""
        candidates = [replica for replica in self.replicas if replica.ready and replica not in tried]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        self._turn += 1
        turn = self._turn % len(candidates)
        return min(candidates[turn:] + candidates[:turn], key=lambda replica: replica.outstanding_tokens)

    def _limits(
        self, sequences: Sequence[IntArray], outputs: Sequence[str], ready: Sequence[Replica]
    ) -> tuple[int, int]:
        """Most tokens and items of a part."""
        limits = [replica.limits for replica in ready]
        max_tokens = min([each.max_batch_tokens for each in limits])
        max_items = min([each.max_request_items for each in limits])
        a_token = sum([4 * output.dimension for output in output_cards(self.card, outputs) if output.per_token])
        if a_token:
            max_tokens = min(max_tokens, max(1, PART_BYTES // a_token))
        if len(ready) > 1 and len(sequences) > 1:
            total = sum(len(sequence) for sequence in sequences)
            max_tokens = min(max_tokens, max(SPREAD_TOKENS, math.ceil(total / len(ready))))
        return max_tokens, max_items

    def _check(self, card: pb.ModelCard, address: str) -> None:
        """What the ready replicas serve is what this front serves; with none ready, the newcomer decides.

        Raises:
            StartupError: another model than the ready replicas', or what the front's own check raises.
        """
        self._check_card(card, address)
        if self._card is not None and self.ready and _identity(card) != _identity(self._card):
            raise StartupError(f"it serves {_identity(card)}, this front serves {_identity(self._card)}")
        self._card = card

    def _reasons(self) -> str:
        return "; ".join(f"{replica.name}: {replica.reason}" for replica in self.replicas)


class _Job(NamedTuple):
    """What all parts of one request have in common.

    Attributes:
        lost: first item of a part -> connections that were lost while they had it.
    """

    outputs: tuple[str, ...]
    dimensions: int
    priority: pb.Priority.ValueType
    deadline: float
    lost: dict[int, int]

    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - asyncio.get_running_loop().time()


def _check_addresses(addresses: Sequence[str]) -> None:
    if not addresses:
        raise StartupError("a front needs the address of at least one engine process")
    if len(set(addresses)) < len(addresses):
        raise StartupError(f"an address is given twice: {', '.join(addresses)}")
    for address in addresses:
        try:
            parse_address(address)
        except InvalidInput as error:
            raise StartupError(error.message) from None


def _identity(card: pb.ModelCard) -> dict[str, object]:
    """What must agree between replicas for an answer not to depend on who gave it."""
    return {
        "model": card.model,
        "architecture": card.architecture,
        "vocabulary": card.vocab_size,
        "max_tokens": card.max_tokens,
        "pooling": card.pooling,
        "dtype": card.dtype,
        "generates": card.generates,
        "end_ids": sorted(card.end_ids),
        "outputs": [(output.name, output.dimension, output.unavailable) for output in card.outputs],
    }


def _first(failed: BaseExceptionGroup[RoseError]) -> RoseError:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RoseError)  # except* let nothing else through
    return error
