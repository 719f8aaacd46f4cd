"""What a measurement carries with it: machine, versions, commit, command.

Knows where to read them; knows nothing of what was measured.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def provenance(module: str, arguments: Sequence[str], packages: Sequence[str]) -> dict[str, object]:
    """Facts for the head of a result file.

    Args:
        module: what was run with `python -m`.
        packages: distributions whose versions matter to the result.
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", module, *arguments]),
        "commit": commit(),
        "cpu": cpu_model(),
        "logical_cpus": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """The checkout's commit, marked where the package's files differ from it."""
    root = Path(__file__).parents[2]
    found = _git(root, "rev-parse", "--short=12", "HEAD")
    return (
        f"{found} with changes" if found and _git(root, "status", "--porcelain", "--", "rose") else found or "unknown"
    )


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
