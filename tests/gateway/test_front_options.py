"""Options with which nothing could be served are refused before anything starts, by the names they are given by."""

from __future__ import annotations

import asyncio

import pytest

from rose import cli
from rose.config.serving import GatewayConfig, check_gateway_config
from rose.errors import StartupError
from rose.gateway.front import make_front

BAD = [
    ({"default_timeout_s": float("nan")}, "--timeout must be more than 0"),
    ({"default_timeout_s": 0.0}, "--timeout"),
    ({"default_timeout_s": -1.0}, "--timeout"),
    ({"default_timeout_s": float("inf")}, "--timeout must be more than 0 and at most 4294967 seconds, not inf"),
    ({"replica_silence_seconds": 0.0}, "--replica-silence-seconds"),
    ({"replica_spin_seconds": -0.1}, "--replica-spin-seconds"),
    ({"replica_spin_seconds": float("nan")}, "--replica-spin-seconds"),
    ({"max_items": 0}, "--max-items must be at least 1, not 0"),
    ({"max_body_bytes": 0}, "--max-body-bytes"),
    ({"max_body_bytes": -5}, "--max-body-bytes must be at least 1, not -5"),
    ({"max_request_tokens": 0}, "--max-request-tokens"),
    ({"drain_seconds": -0.1}, "--drain-seconds"),
    ({"drain_seconds": float("nan")}, "--drain-seconds"),
    ({"drain_seconds": float("inf")}, "--drain-seconds"),
    ({"http_port": None, "grpc_port": None}, "both --http and --grpc are off"),
    ({"http_port": 9000, "grpc_port": 9000}, "each needs a port of its own"),
    ({"http_port": 65536}, "--http must be 0 to 65535, or off, not 65536"),
    ({"grpc_port": -1}, "--grpc"),
    ({"tokenizer_threads": 0}, "--tokenizer-threads must be at least 1"),
    ({"tokenizer_queue": 0}, "--tokenizer-queue"),
    ({"inline_chars": -1}, "--inline-chars"),
    ({"host": ""}, "--host is empty"),
    ({"replica_names": ("a", "b")}, "2 replica_names for 1 replicas"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_an_option_that_cannot_be_is_named(change, words):
    with pytest.raises(StartupError) as refused:
        check_gateway_config(GatewayConfig(replicas=("unix:/x",), **change))
    assert words in refused.value.message


def test_the_defaults_and_the_edges_are_fine():
    check_gateway_config(GatewayConfig(replicas=()))
    edges = {"drain_seconds": 0.0, "inline_chars": 0, "max_items": 1, "http_port": 0, "grpc_port": 0}
    check_gateway_config(GatewayConfig(replicas=(), **edges))


def test_a_front_checks_before_it_reads_the_folder(tmp_path):
    async def run():
        async with make_front(GatewayConfig(replicas=("unix:/x",), max_items=0), tmp_path / "nowhere"):
            raise AssertionError("it started")

    with pytest.raises(StartupError, match="--max-items"):
        asyncio.run(run())


@pytest.mark.parametrize("command", [["serve"], ["gateway", "--replica", "unix:/x"]])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeout", "nan"], "--timeout must be more than 0"),
        (["--http", "off"], "both --http and --grpc are off"),
        (["--max-items", "0"], "--max-items must be at least 1, not 0"),
        (["--drain-seconds", "-1"], "--drain-seconds must be"),
    ],
)
def test_the_command_refuses_with_status_2(command, options, words, tmp_path, capsys):
    name, *rest = command
    assert cli.main([name, str(tmp_path), *rest, *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err.splitlines()[-1]
    assert not captured.out
