"""One of several fronts, as `fronts.py` starts it: `python -m rose.gateway JSON`.

Says `rose-front ready` when it listens and `rose-front serving` when a replica is ready; a refusal is the last line on
standard error, with exit status 2. Knows its argument; knows neither requests nor processes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from rose.config.serving import GatewayConfig
from rose.errors import RoseError


def main() -> int:
    given: dict[str, Any] = json.loads(sys.argv[1])
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given["config"].items()
    }
    config = GatewayConfig(**fields)
    logging.basicConfig(level=given["log_level"], format="%(asctime)s %(levelname)s %(message)s")
    # prometheus_client decides by this, when it is imported, whether it counts in memory or in files.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = config.metrics_folder
    from rose.gateway.run import run_front

    try:
        return run_front(
            config,
            Path(given["folder"]),
            reading=given["reading"],
            on_listening=lambda _: _say("rose-front ready"),
            on_ready=lambda _: _say("rose-front serving"),
        )
    except RoseError as error:
        sys.stderr.write(f"rose-front: {error.message}\n")
        return 2


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
