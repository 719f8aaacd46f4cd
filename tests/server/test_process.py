"""The engine process as its parent sees it: the ready line, signals, exit statuses, what it loads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.client import Client
from rose.config import read_model_folder
from rose.convert import load_model
from rose.engine import Request, build_engine
from rose.errors import StartupError, Unavailable
from rose.proto import rose_pb2 as pb
from rose.proto.address import parse_address
from rose.proto.frames import FrameType
from rose.server.__main__ import build_parser
from rose.server.listener import Listener
from rose.server.run import fit_budgets
from tests.server.running_server import RawPeer
from tests.support.tiny_checkpoints import edit_json, tiny_bert

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rose.server", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def ready_address(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline()
    found = re.fullmatch(r"rose-server ready (\S+)\n", line)
    assert found, line + process.stderr.read()
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("process") / "bert", prompts={"query": "query: "})


def test_a_life(folder, tmp_path):
    """Report C157 (kserve#3360): SIGTERM ends the process cleanly: what is open is finished, whoever is connected."""
    process = start(
        str(folder), "--address", f"unix:{tmp_path}/s.sock", "--served-name", "little", "--max-tokens", "100"
    )
    try:
        address = ready_address(process)
        assert address == f"unix:{tmp_path}/s.sock"
        with Client(address) as client:
            card = client.info()
            assert (card.model, card.max_tokens, card.prompts["query"]) == ("little", 100, "query: ")
            client.embed([[1, 2, 3]])
            before = cpu_ticks(process.pid)
            time.sleep(1.0)
            assert cpu_ticks(process.pid) - before <= 1, "an idle engine process uses less than a percent of a core"
            with RawPeer(address, timeout_s=30) as peer:
                peer.request(1, [[5] * 100] * 1000)
                while not client.stats().open_requests:
                    time.sleep(0.002)
                process.send_signal(signal.SIGTERM)
                frame = peer.frame()
                assert frame.type is FrameType.EMBED_RESULT, frame.payload
                assert list(pb.EmbedResponse.FromString(frame.payload).outputs[0].values.shape) == [1000, 64]
            assert process.wait(10) == 0
        assert not Path(tmp_path, "s.sock").exists()
        with pytest.raises(Unavailable):
            Client(address)
        told = process.stderr.read()
        for fact in ("pooling", "mean (1_Pooling/config.json)", "bidirectional", "query='query: '", "float32 on cpu"):
            assert fact in told
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.communicate()


def cpu_ticks(pid: int) -> int:
    """User and system time in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_refused_at_start(folder, tmp_path):
    lacking = tiny_bert(tmp_path / "lacking")
    edit_json(lacking / "config.json", num_hidden_layers=3)
    for arguments, words in (
        ((str(tmp_path / "nothing"),), "nothing"),
        ((str(lacking),), "lacks"),
        ((str(folder), "--bulk-tokens", "100"), "bulk_tokens of 100 hold no sequence of 128 tokens"),
    ):
        process = start(*arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert out == ""
        assert err.startswith("rose-server: ")
        assert words in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flag", "causal"), [("--causal", True), ("--bidirectional", False), ("--no-causal", False), ("", None)]
)
def test_attention_mode_and_name_by_the_same_flags_as_the_command_line(flag, causal):
    options = build_parser().parse_args(["folder", *([flag] if flag else []), "--name", "mine"])
    assert getattr(options, "causal", None) is causal
    assert options.served_name == build_parser().parse_args(["folder", "--served-name", "mine"]).served_name == "mine"


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ({}, "cpu", (512, 2048)),
        ({}, "cuda", (8192, 16384)),
        ({"online_tokens": 4096}, "cpu", (4096, 4096)),
        ({"bulk_tokens": 300}, "cpu", (300, 300)),
        ({"bulk_tokens": 8192}, "cpu", (512, 8192)),
    ],
)
def test_batches_of_a_cpu_are_smaller_unless_asked(folder, asked, device, expected):
    budgets = fit_budgets(asked, read_model_folder(folder), torch.device(device))
    assert (budgets.online_tokens, budgets.bulk_tokens) == expected
    assert budgets.max_tokens == 128


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_do_not_grow_with_the_longest_text(tmp_path, device):
    long = read_model_folder(tiny_bert(tmp_path / "long", max_positions=32768))
    expected = fit_budgets({}, read_model_folder(tiny_bert(tmp_path / "short")), torch.device(device)).bulk_tokens
    assert fit_budgets({}, long, torch.device(device)).bulk_tokens == expected


def test_a_text_longer_than_a_cpus_batch_is_still_served(tmp_path):
    long = read_model_folder(tiny_bert(tmp_path / "long", max_positions=4096))
    budgets = fit_budgets({}, long, torch.device("cpu"))
    assert (budgets.max_tokens, budgets.bulk_tokens) == (4096, 2048)
    engine = build_engine(load_model(long), budgets, num_threads=1)
    engine.add(Request(1, [np.full(4096, 7, np.int32), np.full(5, 7, np.int32)]))
    results = []
    while not engine.idle:
        results += engine.step()
    assert [result.tokens for result in results] == [4096, 5]
    assert all(np.isfinite(result.outputs["dense"].result()).all() for result in results)
    engine.close()


def test_what_the_engine_process_loads():
    """Neither HTTP, nor gRPC, nor a tokenizer: nothing that could get in the way of the loop."""
    code = "import sys, rose.server.__main__; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    ).stdout
    loaded = set(out.split())
    assert "torch" in loaded
    assert not loaded & {"grpc", "starlette", "uvicorn", "httpx", "tokenizers", "transformers", "msgspec", "h11"}


def test_a_taken_address_is_refused(tmp_path):
    for address in ("127.0.0.1:0", f"unix:{tmp_path}/s.sock"):
        first = Listener(parse_address(address))
        first.listen()
        with pytest.raises(StartupError, match="cannot listen at"):
            Listener(first.address)
        first.close()
        Listener(first.address).close()


def test_a_socket_file_left_over_is_replaced_and_other_files_are_not(tmp_path):
    path = tmp_path / "s.sock"
    left_over = Listener(parse_address(f"unix:{path}"))
    left_over.socket.close()
    assert path.exists()
    again = Listener(parse_address(f"unix:{path}"))
    again.close()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(StartupError, match="no socket"):
        Listener(parse_address(f"unix:{path}"))
    assert path.read_text() == "precious"
