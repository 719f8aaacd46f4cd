"""docs/light_link.md is true: its bytes, its tables, its limits, and the client it prints."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from rose.config import ServerConfig
from rose.errors import WIRE_ERRORS
from rose.proto import rose_pb2 as pb
from rose.proto.convert import error_from_proto, tensor_from_proto, tokens_from_proto
from rose.proto.frames import FrameDecoder, FrameType
from rose.server.__main__ import build_parser
from rose.server.clients import MAX_CONNECTIONS
from tests.server.fake_engine import plain_row
from tests.server.running_server import serving

DOCUMENT = (Path(__file__).parents[2] / "docs" / "light_link.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^## ", DOCUMENT.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.M)[0]


def example_frames():
    """The hex columns of the example section, one frame a block."""
    for block in re.findall(r"(?:^    .*\n)+", section("Example bytes"), flags=re.M):
        lines = [re.split(r"\s{2,}", line.strip())[0] for line in block.splitlines()]
        yield FrameDecoder().feed(bytes.fromhex(" ".join(lines)))


def test_the_example_bytes_say_what_the_text_says():
    (request,), (answer,), (error,) = example_frames()
    assert (request.type, request.request_id, request.deadline_ms) == (FrameType.EMBED, 1, 1000)
    sequences = tokens_from_proto(pb.EmbedRequest.FromString(request.payload).tokens)
    assert [ids.tolist() for ids in sequences] == [[101, 2023, 102], [101, 102]]
    response = pb.EmbedResponse.FromString(answer.payload)
    assert (answer.type, answer.request_id, response.prompt_tokens) == (FrameType.EMBED_RESULT, 1, 5)
    assert tensor_from_proto(response.outputs[0].values).ravel().tolist() == pytest.approx([0.6, 0.8, 1, 0])
    told = error_from_proto(pb.Error.FromString(error.payload))
    assert (error.type, error.request_id) == (FrameType.ERROR, 2)
    assert (told.kind, told.message, told.param, told.index) == (
        "invalid_input",
        "a sequence has no tokens",
        "input",
        1,
    )


def test_every_frame_type_is_in_the_table():
    rows = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", section("Frames"), flags=re.M))
    assert rows == {str(int(kind)): kind.name for kind in FrameType}


def test_every_kind_of_error_is_in_the_table():
    table = section("Errors")
    for kind in WIRE_ERRORS:
        assert f"`{kind.kind}`" in table


def test_the_limits_are_the_defaults():
    rows = re.findall(r"^\| [^|]* \| (?:(\d+)( MiB| s)?) \| (?:`--([a-z-]+)`)? ?\|", section("Limits"), flags=re.M)
    known = {option: int(number) << (20 if unit == " MiB" else 0) for number, unit, option in rows}
    assert known.pop("") == MAX_CONNECTIONS
    assert len(known) == 5
    assert known == {option: getattr(ServerConfig(), option.replace("-", "_")) for option in known}


def test_every_option_it_names_exists():
    options = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert set(re.findall(r"`(--[a-z-]+)`", DOCUMENT)) <= options


def test_the_client_it_prints_works():
    code = re.search(r"```python\n(.*?)```", DOCUMENT, flags=re.S)[1]
    names: dict = {}
    exec(compile(textwrap.dedent(code), "light_link.md", "exec"), names)
    with serving() as server:
        host, _, port = server.address.rpartition(":")
        rows = names["embed"](host, int(port), [[1, 2, 3], [4]])
        assert rows == [tuple(plain_row([1, 2, 3])), tuple(plain_row([4]))]
        with pytest.raises(RuntimeError, match="outside the vocabulary"):
            names["embed"](host, int(port), [[-1]])
