"""What is told of a load that gave no row: a line where it was refused, the traceback where something is at fault.

Knows errors; knows no loads.
"""

from __future__ import annotations

import traceback

from rose.errors import InternalError, RoseError


def failed(what: str, error: Exception) -> None:
    """Print it. A RoseError names field and limit itself; of our own faults the place is wanted too."""
    refused = isinstance(error, RoseError) and not isinstance(error, InternalError)
    told = f" {error}" if refused else "\n" + "".join(traceback.format_exception(error))
    print(f"{what} failed, no row:{told}", flush=True)
