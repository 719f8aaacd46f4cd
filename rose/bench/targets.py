"""What the loads have in common: which model, from which folder, on which device, and the facts every row carries.

Knows options and folders; knows neither loads nor carriers.
"""

from __future__ import annotations

import argparse
import platform
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from rose.bench import loads
from rose.bench.machine import commit, cpu_model
from rose.bench.quantised_shapes import LEAST_COSINE, SCHEME_OF, quantised_checkpoint
from rose.bench.records import Facts
from rose.bench.shapes import SHAPES, Shape, build_checkpoint, made_folder
from rose.bench.stages import stage
from rose.config.ending import GATEWAY, require
from rose.errors import InvalidInput, StartupError


@dataclass(frozen=True, slots=True)
class Target:
    """One model to measure.

    Attributes:
        made: its shape, where the folder holds random weights made here.
        plain: where its weights are before any quantisation: what a reference runs on. `folder` where there is none.
    """

    name: str
    folder: Path
    device: torch.device
    dtype: torch.dtype
    facts: Facts
    made: Shape | None
    plain: Path

    @property
    def least_cosine(self) -> float:
        """Between its answers and the reference's."""
        return LEAST_COSINE if self.facts.dtype in SCHEME_OF else loads.LEAST_COSINE


def add_common_arguments(
    parser: argparse.ArgumentParser, shapes: Mapping[str, Shape] = SHAPES, *, warm_up: bool = False
) -> None:
    """
    Args:
        warm_up: whether a server captures its usual graphs at start, where nothing is said.
    """
    parser.add_argument(
        "--model",
        action="append",
        help=f"one of {', '.join(shapes)} (seeded random weights), or NAME=FOLDER; repeatable",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *SCHEME_OF),
        default="auto",
        help="auto: bfloat16 on CUDA, else float32; the others: made weights in 8 bits (fp8: a scale a tensor, static)",
    )
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=warm_up,
        help="let the server capture its usual graphs at start",
    )
    parser.add_argument("--url", help="measure another OpenAI-compatible server: its address up to /embeddings")
    parser.add_argument(
        "--folders", type=Path, default=made_folder(), help="where made checkpoints are kept (default: %(default)s)"
    )
    parser.add_argument("--commit", help="what is measured, where the machine has no checkout to ask")
    parser.add_argument("--verbose", action="store_true", help="a line for each stage of the start and its seconds")
    parser.add_argument("--out", type=Path, help="JSONL file of rows; a new run replaces the old rows of its loads")


def add_window_arguments(parser: argparse.ArgumentParser, *, seconds: float, warm: float) -> None:
    """Of the loads with client processes."""
    parser.add_argument("--profile", action="store_true", help="first: time of every kernel, in process, beside --out")
    parser.add_argument("--seconds", type=float, default=seconds, help="length of the window")
    parser.add_argument(
        "--warm",
        type=float,
        default=warm,
        help="the window begins once no batch of a new shape has come for so many seconds under load",
    )
    parser.add_argument(
        "--steady-within", type=float, default=30.0, help="seconds under load after which that is given up, without row"
    )


def targets(
    arguments: argparse.Namespace, command: str, default: list[str], shapes: Mapping[str, Shape] = SHAPES
) -> Iterator[Target]:
    """Each model asked for in turn, its folder made if it is not there.

    Args:
        command: as the rows shall tell it.
        default: models where none is asked for.
        shapes: those that can be made.

    Raises:
        StartupError: a name without a folder that is no shape, or a Python module that is missing; before anything is
            made or started.
    """
    require(_modules(arguments), "bench")
    asked = [_named(spec, shapes) for spec in arguments.model or default]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    run_id = uuid.uuid4().hex[:8]
    for name, given in asked:
        facts = Facts(
            run_id=run_id,
            commit=arguments.commit or commit(),
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            command=command.replace(str(arguments.out), arguments.out.name) if arguments.out else command,
            machine=machine(device),
            model=name,
            dtype=str(dtype).removeprefix("torch.") if arguments.dtype == "auto" else arguments.dtype,
        )
        with stage(f"folder of {name}", arguments.verbose):
            folder = Path(given) if given else build_checkpoint(name, arguments.folders / name, shapes=shapes)
        plain, made = folder, None if given else shapes[name]
        if arguments.dtype != "auto":
            if made is None:
                raise InvalidInput(f"--dtype {arguments.dtype} is for made weights; {name} has a folder of its own")
            folder = quantised_checkpoint(
                folder, arguments.dtype, device, task="generate" if made.pooling is None else "embed"
            )
        yield Target(name, folder, device, dtype, facts, made, plain)


def _modules(arguments: argparse.Namespace) -> list[str]:
    """What a run imports or starts beside the engine: transformers for reference and made weights, and the front
    where a way leads through processes of their own."""
    compared = not getattr(arguments, "no_check", False)
    made = any("=" not in spec for spec in arguments.model or [""])
    started = not arguments.url and set(getattr(arguments, "via", None) or ["http"]) != {"engine"}
    return [*(["transformers"] if compared or made else []), *(GATEWAY if started else ())]


def _named(spec: str, shapes: Mapping[str, Shape]) -> tuple[str, str]:
    """(name, folder or "") of one --model."""
    name, _, given = spec.partition("=")
    if not given and name not in shapes:
        raise StartupError(f"--model {spec}: no such shape; there are {', '.join(shapes)}, or give NAME=FOLDER")
    return name, given


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return (
            f"1 x {torch.cuda.get_device_name(device)}, torch {torch.__version__}, Python {platform.python_version()}"
        )
    return f"{cpu_model()}, torch {torch.__version__}"
