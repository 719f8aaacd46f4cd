"""How a command ends that cannot go on: a line on standard error and an exit status, for `rose` and `python -m` alike.

Knows errors, exit statuses (2 refused, 130 interrupted, 141 the reader of its output went away), and which extra brings
which Python module; knows no command.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec

from rose.errors import RoseError, StartupError

# Modules of the optional dependencies in pyproject.toml, by the extra that brings them; what they are for.
GATEWAY = (
    *("msgspec", "starlette", "uvicorn", "httptools", "uvloop", "prometheus_client", "jinja2"),
    *("grpc", "grpc_health", "grpc_reflection"),
)
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gateway": ("serving", GATEWAY),
    "bench": ("measurements", ("transformers", "sentence_transformers", "matplotlib", "httpx")),
    "convert": ("adapters", ("peft",)),
    "parquet": ("Parquet files", ("pyarrow",)),
}


def ended(command: Callable[[], int], prog: str = "rose") -> int:
    """Run a command; the exit status, with a line that begins with `prog` where it was refused.

    Raises:
        Whatever is nobody's refusal but a fault.
    """
    try:
        return command()
    except RoseError as error:
        return _refused(prog, error.message)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "rose":
            raise
        return _refused(prog, missing(error.name))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read standard output has had enough; Python must not try to flush the rest at its end.
        _forget_output()
        return 141
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _forget_output()
        return _refused(prog, f"{error.filename or 'the output'} cannot be written: {error.strerror}")


# Disk, quota or largest file: what no command can help.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _forget_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def missing(module: str, extra: str = "") -> str:
    """A module that is not installed, and the extra to install.

    Args:
        extra: the one that brings all the command needs; found by the module if not given.
    """
    top = module.partition(".")[0]
    extra = extra or next((name for name, (_, modules) in EXTRAS.items() if top in modules), "")
    told = f"this command needs the Python module {module}, which is not installed here"
    return f"{told}; for {EXTRAS[extra][0]}, install rose-serving[{extra}]" if extra else told


def require(modules: Iterable[str], extra: str) -> None:
    """
    Args:
        modules: top-level ones; none is imported. extra: brings all of them.

    Raises:
        StartupError: one of them is not installed.
    """
    for module in modules:
        if find_spec(module) is None:
            raise StartupError(missing(module, extra))


def _refused(prog: str, message: str) -> int:
    sys.stderr.write(f"{prog}: {message}\n")
    return 2
