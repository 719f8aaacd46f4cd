"""`rose calibrate` without an installed console script: python scripts/calibrate.py MODEL --data FILE ..."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rose.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["calibrate", *sys.argv[1:]]))
