"""What is told of a load that gave no row: a line where it was refused, the traceback where something is at fault; and
how a model that fails leaves the others their turn.

Knows errors; knows no loads.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

from rose.bench.targets import Target
from rose.errors import InternalError, RoseError


def failed(what: str, error: Exception, lost: str = "row") -> None:
    """Print it, and what is `lost` with it. A RoseError names field and limit itself; of our own faults the place is
    wanted too."""
    refused = isinstance(error, RoseError) and not isinstance(error, InternalError)
    told = f" {error}" if refused else "\n" + "".join(traceback.format_exception(error))
    print(f"{what} failed, no {lost}:{told}", flush=True)


def over_models(targets: Iterable[Target], run: Callable[[Target], int], *, alone: bool) -> int:
    """How many loads failed, of all models in turn. One that cannot be loaded, or gives wrong answers, counts as one.
    What `targets` raises, where a folder cannot be made, ends the run.

    Args:
        run: the loads of one model; returns how many failed.
        alone: there is one model: what it raises goes on to the caller.
    """
    count = 0
    for target in targets:
        try:
            count += run(target)
        except Exception as error:
            if alone:
                raise
            count += 1
            failed(target.name, error)
    return count
