"""Generating on a CUDA device behind the reactor: no descriptor to wait for, two batches in flight, graphs replayed."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.client import AsyncClient, Client
from rose.config import ServerConfig, read_model_folder
from rose.errors import Cancelled
from rose.proto.address import parse_address
from rose.proto.frames import FrameType, encode_frame
from rose.server.listener import Listener
from rose.server.run import Serving
from rose.server.start_generation import start_generation
from rose.server.waiting import sharpen_sleep
from tests.server.generate_frames import answer, ask
from tests.server.running_server import RawPeer
from tests.support.tiny_language_models import tiny_lm

pytestmark = pytest.mark.gpu

BUDGETS = {"max_running": 16, "kv_cache_bytes": 64 << 20, "graph_bytes": 512 << 20}


class Served:
    """A folder behind a reactor in a thread, put together as `python -m rose.server` does."""

    def __init__(self, stack: ExitStack, path: Path, where: str, device: str, dtype: torch.dtype) -> None:
        listener = stack.enter_context(closing(Listener(parse_address(where))))
        folder, config = read_model_folder(path), ServerConfig()
        starting = start_generation(folder, Serving(), BUDGETS, config, listener, torch.device(device), dtype)
        self.engine, reactor = stack.enter_context(starting)
        self.address = str(listener.address)
        reactor.listen()

        def run() -> None:
            sharpen_sleep()
            with self.engine.executor.owner():
                reactor.run()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        stack.callback(self.thread.join, 10)
        stack.callback(reactor.stop)
        stack.callback(reactor.stop)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The same weights in fp32 on the device and on the CPU."""
    base = tmp_path_factory.mktemp("cuda")
    path = tiny_lm(base / "lm", "qwen3", hidden_size=256, head_dim=64, max_positions=1024)
    with ExitStack() as stack:
        yield [Served(stack, path, f"unix:{base}/{device}.sock", device, torch.float32) for device in ("cuda", "cpu")]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 400, size=n).tolist() for n in random.integers(1, 200, size=count)]


def continued(address: str, ids: list[int], count: int) -> list[int]:
    with Client(address) as client:
        chunks = client.generate(ids, max_new_tokens=count, temperature=0.0, ignore_eos=True)
        return [token for chunk in chunks for token in chunk.tokens]


def test_tokens_alone_and_together_are_those_of_the_cpu(servers):
    on_device, on_cpu = servers
    expected = [continued(on_cpu.address, ids, 24) for ids in prompts(20)]
    assert [continued(on_device.address, ids, 24) for ids in prompts(20)] == expected

    async def one(client, ids):
        tokens = client.generate(ids, max_new_tokens=24, temperature=0.0, ignore_eos=True)
        return [token async for some in tokens for token in some.tokens]

    async def main():
        async with await AsyncClient.connect(on_device.address) as client:
            return await asyncio.gather(*[one(client, ids) for ids in prompts(20)])

    assert asyncio.run(main()) == expected
    with Client(on_device.address) as client:
        counters = client.stats().engine_counters
        assert counters["graph_hits"] > counters["graph_plain"]


def test_two_hundred_requests_with_random_cancels_are_each_answered_once(servers):
    address = servers[0].address
    random = np.random.default_rng(3)
    different, cancelled, answers = prompts(10, seed=5), set(), {}
    lengths = {i: int(random.integers(1, 60)) for i in range(1, 201)}
    with RawPeer(address, timeout_s=60) as peer:
        for i, count in lengths.items():
            ask(peer, i, different[i % 10], max_new_tokens=count, temperature=0.0, ignore_eos=True)
            if random.random() < 0.3:
                target = int(random.integers(max(1, i - 20), i + 1))
                cancelled.add(target)
                peer.send(encode_frame(FrameType.CANCEL, target))
        answer(peer, answers, 200)
    for i, (tokens, end) in answers.items():
        if isinstance(end, Cancelled):
            assert i in cancelled
        else:
            assert end.completion_tokens == len(tokens) == lengths[i]
    with Client(address) as client:
        end = time.monotonic() + 5
        while client.stats().engine_counters["pages_used"]:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_idle_it_uses_no_core(servers):
    served = servers[0]
    stat = Path(f"/proc/self/task/{served.thread.native_id}/schedstat")
    continued(served.address, [5, 6], 4)
    time.sleep(0.1)
    before = int(stat.read_text().split()[0])
    time.sleep(1.0)
    assert int(stat.read_text().split()[0]) - before < 10e6, "an idle engine process uses less than a percent of a core"
