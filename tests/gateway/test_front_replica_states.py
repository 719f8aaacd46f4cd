"""What becomes of a replica that dies, falls silent or cannot be reached, and of the request it had."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import time
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

import rose.gateway.replica as replica_module
from rose.errors import InvalidInput, Overloaded, StartupError, Unavailable
from rose.gateway.metrics import Metrics
from rose.gateway.replica import Replica
from rose.gateway.replicas import ReplicaPool
from rose.proto import rose_pb2 as pb
from rose.proto.convert import tokens_to_proto
from tests.gateway.conftest import card_for, live_front
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.processes import running, wait_for
from tests.gateway.test_front_replicas import check_rows, pool_over, sequences_of, soon, until


def deadly_to(engine, ids):
    """The engine dies of a request with these ids, as of an illegal access."""

    def fault(request):
        if request.tokens.ids == ids.astype("<i4").tobytes():
            for writer in engine._writers:
                writer.transport.abort()

    engine.fault = fault


def test_a_request_that_kills_engines_kills_no_third_one(text_folder, tmp_path):
    async def run():
        card = card_for(text_folder)
        async with pool_over(text_folder, tmp_path, card, card, card, card) as (pool, engines):
            (poison,) = sequences_of(9)
            for engine in engines:
                deadly_to(engine, poison)
            with pytest.raises(Unavailable, match="2 replicas were lost while they had this request") as refused:
                await pool.embed([poison], deadline=soon())
            assert refused.value.retry_after_s
            assert sum(len(engine.seen) for engine in engines) == 2
            assert len(pool.ready) == 2
            check_rows(await pool.embed(sequences_of(5), deadline=soon()), sequences_of(5))

    asyncio.run(run())


def test_losses_count_through_a_pause_for_room(text_folder, tmp_path, small):
    """A part that was lost once, and then refused by full replicas, does not start with a clean record."""

    async def run():
        async with pool_over(text_folder, tmp_path, small, small, small) as (pool, engines):
            sequences = sequences_of(*[100] * 8)
            poison = b"".join(ids.astype("<i4").tobytes() for ids in sequences[6:])
            met = []

            def fault(engine, request):
                if request.tokens.ids != poison:
                    return
                met.append(engine)
                if len(met) in (2, 3):
                    raise Overloaded("full", retry_after_s=0.01)
                for writer in engine._writers:
                    writer.transport.abort()

            for engine in engines:
                engine.fault = partial(fault, engine)
            with pytest.raises(Unavailable, match="2 replicas were lost"):
                await pool.embed(sequences, deadline=soon())
            assert len(met) == 4  # dies, full, full; asked again, dies

    asyncio.run(run())


@pytest.fixture
def small(text_folder):
    return card_for(text_folder, max_batch_tokens=200, max_request_items=7)


def test_work_of_a_silent_engine_is_done_by_another(text_folder, tmp_path):
    """A stopped process answers nothing and closes nothing; its parts are more than its socket holds."""
    card = card_for(text_folder, max_batch_tokens=1 << 20)
    address = f"unix:{tmp_path}/stopped"
    engine = {"folder": str(text_folder), "pids": str(tmp_path / "pids"), "address": address}
    with running("engine", **engine) as process:
        assert process.stdout.readline()

        async def run():
            async with pool_over(text_folder, tmp_path, card) as (other, (healthy,)):
                addresses = [address, f"unix:{healthy.path}"]
                names = ["engine-0", "engine-1"]
                async with ReplicaPool(addresses, lambda *_: None, Metrics(), names=names, silence_s=0.6) as pool:
                    await until(lambda: len(pool.ready) == 2)
                    os.kill(process.pid, signal.SIGSTOP)
                    try:
                        sequences = sequences_of(*[4000] * 100)
                        started = time.monotonic()
                        results = await asyncio.gather(*(pool.embed(sequences, deadline=soon(20)) for _ in range(6)))
                        for result in results:
                            check_rows(result, sequences)
                        assert 0.3 < time.monotonic() - started < 10
                        assert [replica.name for replica in pool.ready] == ["engine-1"]
                        await until(lambda: pool.replicas[0].reason == "connected, no model card within 0.6 s")
                    finally:
                        os.kill(process.pid, signal.SIGCONT)
                    await until(lambda: len(pool.ready) == 2)
                assert other.ready

        asyncio.run(run())


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_front_that_ends_cuts_off_was_not_lost(text_folder, tmp_path, replicas):
    async def run():
        async with pool_over(text_folder, tmp_path, *[card_for(text_folder)] * replicas) as (pool, engines):
            for engine in engines:
                engine.delay_s = 60.0
            request = asyncio.create_task(pool.embed(sequences_of(5), deadline=soon()))
            await until(lambda: any(engine.seen for engine in engines))
            await pool.__aexit__(None, None, None)
            with pytest.raises(Unavailable, match=r"^the server shut down before this was answered$") as told:
                await request
            assert told.value.retry_after_s

    asyncio.run(run())


def test_an_engine_that_was_started_with_the_front_is_said_to_load(text_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "rose.gateway")

    async def run():
        path = tmp_path / "engine"
        async with ReplicaPool([f"unix:{path}"], lambda *_: None, Metrics(), names=["engine-3"]) as pool:
            await until(lambda: pool.replicas[0].reason == "it is loading")
            async with FakeEngine(str(path), card_for(text_folder)):
                await until(lambda: pool.ready)

    asyncio.run(run())
    said = [record.getMessage() for record in caplog.records if "engine-3" in record.getMessage()]
    assert said[:2] == ["replica engine-3 is loading", "replica engine-3 is ready"]


def test_every_change_is_logged_once_with_its_reason(text_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "rose.gateway")
    engine = {"folder": str(text_folder), "pids": str(tmp_path / "pids"), "address": f"unix:{tmp_path}/engine"}

    def said():
        return [record.getMessage() for record in caplog.records if "replica engine-7" in record.getMessage()]

    async def run():
        with running("engine", **engine) as process:
            assert process.stdout.readline()
            addresses = [engine["address"]]
            async with ReplicaPool(addresses, lambda *_: None, Metrics(), names=["engine-7"]) as pool:
                await until(lambda: pool.ready)
                process.kill()
                await until(lambda: "nothing listens there" in pool.replicas[0].reason)
                await asyncio.sleep(0.5)  # several tries more

    asyncio.run(run())
    messages = said()
    # A killed process ends its connections in any of these ways.
    messages[3] = re.sub(
        r"connection to engine-7 lost(: \[Errno 104\] Connection reset by peer)?$", "connection lost", messages[3]
    )
    assert messages == [
        "replica engine-7 is loading",
        "replica engine-7 is ready",
        "replica engine-7 serves tiny/embedder on cpu",
        "replica engine-7 is not ready: connection lost",
        "replica engine-7 is not ready: nothing listens there, it is loading or gone (Connection refused)",
    ]


def test_why_a_connection_cannot_be_made_is_kept(tmp_path):
    """No socket, no such name, and an address that is a file."""
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def reason(address):
        replica = Replica(address, lambda *_: None)
        replica.start()
        await until(lambda: replica.reason != "connecting")
        found = replica.reason
        await replica.close()
        return found

    async def run():
        return [
            await reason(address)
            for address in (
                f"unix:{tmp_path}/file",
                f"127.0.0.1:{port}",
                "no-such-host.invalid:7000",
                f"unix:{tmp_path}/no",
            )
        ]

    file, refused, unknown, nobody = asyncio.run(run())
    assert "refused" in file.lower() or "socket" in file
    assert "nothing listens there, it is loading or gone (" in refused
    assert unknown.startswith("cannot connect: [Errno -")
    assert nobody == "nothing listens there, it is loading or gone (No such file or directory)"


def test_a_watcher_survives_whatever_goes_wrong(text_folder, tmp_path):
    async def run():
        faults = [KeyError("x"), RuntimeError("y")]

        def check(card, address):
            if faults:
                raise faults.pop()

        async with pool_over(text_folder, tmp_path, card_for(text_folder), check=check, up=False) as (pool, _):
            await until(lambda: pool.replicas[0].reason == "an internal error of the front: RuntimeError")
            await until(lambda: pool.ready)
            check_rows(await pool.embed(sequences_of(5), deadline=soon()), sequences_of(5))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("a..b:7000", "between its dots has 1 to 63 characters, not 0"),
        (".:7000", "has 1 to 63 characters, not 0"),
        ("a" * 300 + ":7000", "300 characters, a name has at most 253"),
        ("a" * 64 + ".b:7000", "not 64"),
        ("a:" + "9" * 5000, "is not an address"),
        ("a" * 10_000, "and 9900 more characters"),
        ("unix:/a\0b", "none of them zero"),
    ],
)
def test_addresses_that_could_never_be_reached_are_refused(address, words):
    with pytest.raises(StartupError, match=words) as refused:
        ReplicaPool([address], lambda *_: None, Metrics())
    assert len(refused.value.message) < 500


def test_the_public_hears_names_not_paths(text_folder):
    """What the supervisor's own sockets are called is nobody's business."""
    card = card_for(text_folder)
    with live_front(text_folder, card, card, replica_names=("engine-0", "engine-1")) as live:
        paths = [engine.path for engine in live.engines]

        def public(text):
            assert not any(path in text for path in paths)
            return text

        ready = live.client.get("/ready")
        assert [replica["address"] for replica in ready.json()["replicas"]] == ["engine-0", "engine-1"]
        public(ready.text)
        metrics = public(live.client.get("/metrics").text)
        assert 'rose_replica_ready{replica="engine-1"} 1.0' in metrics
        assert "_created" not in metrics
        for engine in live.engines:
            engine.backwards = 1000
        late = live.client.post("/v1/embeddings", json={"input": [5]}, headers={"X-Request-Timeout-Ms": "50"})
        assert late.status_code == 504
        public(late.text)
        for engine in live.engines:
            live.run(engine.__aexit__)
        wait_for(lambda: live.client.get("/ready").status_code == 503)
        public(live.client.get("/ready").text)
        public(live.embed([5]).text)


def test_an_error_about_an_input_is_not_a_reason_to_ask_another(text_folder, tmp_path):
    async def run():
        card = card_for(text_folder)
        async with pool_over(text_folder, tmp_path, card, card) as (pool, engines):

            def fault(request):
                raise InvalidInput("no", param="input", index=0)

            for engine in engines:
                engine.fault = fault
            with pytest.raises(InvalidInput):
                await pool.embed(sequences_of(5), deadline=soon())
            assert sum(len(engine.seen) for engine in engines) == 1

    asyncio.run(run())


@pytest.fixture
def no_turns(monkeypatch):
    """A front that has tried once does so again when somebody looks, and else not for the length of a test."""
    for name in ("FIRST_RETRY_S", "LAST_RETRY_S", "WATCH_S"):
        monkeypatch.setattr(replica_module, name, 600.0)


def test_a_look_reaches_an_engine_that_came_up_since_the_last_try(text_folder, tmp_path, no_turns):
    async def run():
        engine = FakeEngine(str(tmp_path / "late"), card_for(text_folder))
        async with ReplicaPool([f"unix:{engine.path}"], lambda *_: None, Metrics()) as pool:
            for _ in range(2):  # the second time it comes back to those that were connected
                await pool.look()
                assert "nothing listens there" in pool.replicas[0].reason
                async with engine:
                    await asyncio.gather(*(pool.look() for _ in range(20)))
                    check_rows(await pool.embed(sequences_of(5), deadline=soon()), sequences_of(5))
                await until(lambda: not pool.ready)
                Path(engine.path).unlink()

    asyncio.run(run())


def test_a_look_is_not_answered_by_a_try_that_began_before_it(text_folder, tmp_path, no_turns, monkeypatch):
    """The one under way is about to fail although the engine is there by now."""
    path = str(tmp_path / "engine")
    connect = replica_module.AsyncClient.connect
    failing, fail = asyncio.Event(), asyncio.Event()
    tries = []

    async def slow(*args, **kwargs):
        tries.append(args)
        if len(tries) == 1:
            failing.set()
            await fail.wait()
            raise Unavailable("cannot connect")
        return await connect(*args, **kwargs)

    async def run():
        monkeypatch.setattr(replica_module.AsyncClient, "connect", slow)
        async with (
            FakeEngine(path, card_for(text_folder)),
            ReplicaPool([f"unix:{path}"], lambda *_: None, Metrics()) as pool,
        ):
            await failing.wait()
            looks = asyncio.gather(pool.look(), pool.look())
            await asyncio.sleep(0)
            fail.set()
            await looks
            assert pool.ready
            assert len(tries) == 2

    asyncio.run(run())


def test_a_look_waits_neither_for_a_silent_engine_nor_for_one_that_is_refused(text_folder, tmp_path, no_turns):
    met = []

    def refuse(card, address):
        met.append(address)
        raise StartupError("not this one")

    async def run():
        async with FakeEngine(str(tmp_path / "other"), card_for(text_folder)) as other:
            async with ReplicaPool([f"unix:{other.path}"], refuse, Metrics()) as pool:
                for _ in range(50):
                    await pool.look()
                assert len(met) == 1  # it is asked again, but seldom
            with socket.socket(socket.AF_UNIX) as silent:
                silent.bind(str(tmp_path / "silent"))
                silent.listen()
                async with ReplicaPool([f"unix:{tmp_path}/silent"], lambda *_: None, Metrics()) as pool:
                    async with asyncio.timeout(20):
                        await asyncio.gather(*(pool.look() for _ in range(50)))
                    assert not pool.ready

    asyncio.run(run())


def test_every_surface_looks_before_it_refuses(text_folder, no_turns):
    """One front of several may learn later than the others that the engine is back."""
    message = pb.EmbedRequest(tokens=tokens_to_proto([np.array([5, 6])])).SerializeToString()
    with live_front(text_folder, card_for(text_folder)) as live:
        (engine,) = live.engines
        (replica,) = live.front.pool.replicas
        channel = grpc.insecure_channel(live.listening.grpc)

        async def away_and_back():
            await engine.__aexit__()
            await until(lambda: not replica.ready)
            Path(engine.path).unlink()
            await engine.__aenter__()

        surfaces = {
            "embeddings": lambda: live.embed([5, 6]).raise_for_status(),
            "ready": lambda: live.client.get("/ready").raise_for_status(),
            "model": lambda: live.client.get("/v1/models/tiny/embedder").raise_for_status(),
            "grpc": lambda: channel.unary_unary("/rose.v1.Rose/Embed")(message, timeout=30),
        }
        with channel:
            for name, ask in surfaces.items():
                live.run(away_and_back)
                assert not replica.ready, name
                ask()
                assert replica.ready, name
