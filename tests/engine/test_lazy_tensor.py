"""Results on their way: polled, blocked on, awaited."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from rose.engine.execution import CpuExecutor, DoneTicket
from rose.engine.lazy_tensor import LazyTensor

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def lazy() -> tuple[DoneTicket[dict[str, np.ndarray]], LazyTensor]:
    ticket: DoneTicket[dict[str, np.ndarray]] = DoneTicket(expected_end=12.5)
    return ticket, LazyTensor(ticket, "embedding")


def test_ready_never_waits_and_result_gives_the_rows_again_and_again():
    ticket, tensor = lazy()
    assert not tensor.ready()
    assert tensor.expected_end == 12.5
    ticket.settle({"embedding": ROWS, "other": ROWS + 1})
    assert tensor.ready()
    np.testing.assert_array_equal(tensor.result(), ROWS)
    assert tensor.result() is tensor.result()


def test_result_waits():
    ticket, tensor = lazy()
    timer = threading.Timer(0.02, ticket.settle, [{"embedding": ROWS}])
    timer.start()
    np.testing.assert_array_equal(tensor.result(), ROWS)


def test_the_forwards_error_is_raised_every_time():
    ticket, tensor = lazy()
    ticket.fail(ArithmeticError("no"))
    assert tensor.ready()
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="no"):
            tensor.result()


def test_awaiting_lets_the_loop_go_on():
    async def main() -> None:
        ticket, tensor = lazy()
        waiting = asyncio.ensure_future(as_coroutine(tensor))
        turns = 0
        while turns < 10:
            await asyncio.sleep(0)
            turns += 1
        assert not waiting.done()
        threading.Thread(target=ticket.settle, args=[{"embedding": ROWS}]).start()
        np.testing.assert_array_equal(await asyncio.wait_for(waiting, 10), ROWS)
        np.testing.assert_array_equal(await tensor, ROWS)

    asyncio.run(main())


async def as_coroutine(tensor: LazyTensor) -> np.ndarray:
    return await tensor


def test_many_tasks_may_await_the_tensors_of_one_batch():
    async def main() -> None:
        ticket: DoneTicket[dict[str, np.ndarray]] = DoneTicket()
        tensors = [LazyTensor(ticket, name) for name in ("a", "b", "a")]
        threading.Timer(0.01, ticket.settle, [{"a": ROWS, "b": ROWS + 1}]).start()
        got = await asyncio.wait_for(asyncio.gather(*map(as_coroutine, tensors)), 10)
        for values, expected in zip(got, (ROWS, ROWS + 1, ROWS), strict=True):
            np.testing.assert_array_equal(values, expected)

    asyncio.run(main())


def test_awaiting_raises_the_forwards_error():
    async def main() -> None:
        ticket, tensor = lazy()
        threading.Timer(0.01, ticket.fail, [ArithmeticError("no")]).start()
        with pytest.raises(ArithmeticError, match="no"):
            await asyncio.wait_for(as_coroutine(tensor), 10)

    asyncio.run(main())


def test_a_cancelled_or_closed_loop_hurts_nobody():
    executor = CpuExecutor(num_threads=1)
    gate = threading.Event()
    ticket = executor.launch(lambda: gate.wait(10) and {"embedding": ROWS})
    tensor = LazyTensor(ticket, "embedding")

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(as_coroutine(tensor), 0.01)

    asyncio.run(give_up())  # its callback now points to a closed loop
    gate.set()
    np.testing.assert_array_equal(tensor.result(), ROWS)
    assert executor.launch(lambda: 1).result() == 1
    executor.close()
