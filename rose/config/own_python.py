"""How ROSE starts itself again: the interpreter and options that find the package that runs now.

`python -m` puts the current folder first on sys.path. In the folder above a clone, the clone's own folder `rose` would
be taken for the package, and a `numpy.py` that lies there for numpy. Knows sys.path; knows no command.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]  # holds the package `rose`


def own_python(module: str) -> tuple[str, ...]:
    """The command line that runs `module`, with no regard for what lies in the current folder (-P).

    A clone that is not installed is found through the current folder alone: there the child looks into it as well.
    """
    here = Path.cwd()
    from_here = here.resolve() == _ROOT and any(path in ("", str(here), str(_ROOT)) for path in sys.path)
    return (sys.executable, *(() if from_here else ("-P",)), "-m", module)
