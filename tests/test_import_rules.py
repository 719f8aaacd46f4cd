"""Rooms import only to their left, and the front rooms never load torch.

Read from the source with `ast`, imports inside functions and under TYPE_CHECKING included, then checked once more by
importing each front room in a process of its own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "rose"

ENGINE_SIDE = (
    *("errors", "config", "batch", "proto", "kernels", "attention_backends"),
    *("layers", "models", "convert", "engine", "select", "server"),
)
FRONT_SIDE = ("errors", "config", "proto", "client", "gateway")
EVERY_ROOM = {*ENGINE_SIDE, *FRONT_SIDE, "hub"}

ALLOWED: dict[str, set[str]] = {
    **{room: set(takewhile(lambda left, room=room: left != room, ENGINE_SIDE)) for room in ENGINE_SIDE},
    **{room: set(takewhile(lambda left, room=room: left != room, FRONT_SIDE)) for room in FRONT_SIDE},
    "hub": {"errors", "config"},
    # The outermost rooms put everything together.
    "bench": EVERY_ROOM,
    "cli": {*EVERY_ROOM, "bench"},
    "__main__": {"cli"},
    "__init__": set(),
}
FRONT_ROOMS = ("config", "proto", "client", "gateway", "hub")
# What the engine process must not hold: it speaks neither HTTP nor gRPC and has no tokeniser.
FRONT_LIBRARIES = {"starlette", "uvicorn", "grpc", "tokenizers", "msgspec", "httpx", "transformers"}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if "_pb2" not in path.name]


def imported_modules(path: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module a file imports."""
    package = ["rose", *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield node.lineno, module
            if module == "rose":
                yield from ((node.lineno, f"rose.{alias.name}") for alias in node.names)


def test_every_room_is_in_the_table():
    assert {room_of(path) for path in sources()} <= set(ALLOWED)


def test_rooms_import_only_to_their_left():
    broken = []
    for path in sources():
        room = room_of(path)
        for line, module in imported_modules(path):
            parts = module.split(".")
            if parts[0] != "rose" or len(parts) == 1 or parts[1] in {room, "__version__"}:
                continue
            if parts[1] not in ALLOWED[room]:
                broken.append(f"rose/{path.relative_to(ROOT)}:{line}: {room} imports {module}")
    assert not broken, "\n".join(broken)


def test_front_rooms_name_no_torch():
    broken = [
        f"rose/{path.relative_to(ROOT)}:{line}: {module}"
        for path in sources()
        if room_of(path) in {*FRONT_ROOMS, "errors"}
        for line, module in imported_modules(path)
        if module.split(".")[0] in {"torch", "triton", "transformers"}
    ]
    assert not broken, "\n".join(broken)


def test_the_reader_sees_lazy_relative_and_package_imports(tmp_path):
    """So that an empty list of breaches means something."""
    source = tmp_path / "kernels" / "x.py"
    source.parent.mkdir()
    source.write_text("def f():\n    from rose import engine\n    from ..models import bert\n    import rose.server\n")
    found = {module for _, module in imported_modules(source, tmp_path)}
    assert {"rose.engine", "rose.models", "rose.server"} <= found
    assert not {"engine", "models", "server"} & ALLOWED["kernels"]


_LOAD = """
import importlib, pkgutil, sys
package = importlib.import_module("rose." + sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(" ".join(sys.modules))
"""


def modules_after_loading(room: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", _LOAD, room], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("room", FRONT_ROOMS)
def test_loading_a_front_room_loads_no_torch_and_no_engine_room(room):
    loaded = modules_after_loading(room)
    rooms = {name.split(".")[1] for name in loaded if name.startswith("rose.")}
    assert "torch" not in loaded
    assert rooms <= {room, *ALLOWED[room]}


def test_loading_the_engine_process_loads_neither_http_nor_grpc_nor_a_tokeniser():
    loaded = modules_after_loading("server")
    assert not FRONT_LIBRARIES & {name.split(".")[0] for name in loaded}


def test_the_command_line_itself_loads_no_torch():
    check = "import sys, rose.cli; rose.cli.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
