"""`rose select-backend` without an installed console script: python scripts/select_backend.py MODEL --report out."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rose.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["select-backend", *sys.argv[1:]]))
