"""Write the table of docs/models.md from the registry, or with --check say whether it is up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rose.models.table import model_table

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- begin: scripts/model_table.py -->\n", "<!-- end: scripts/model_table.py -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page differs")
    options = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    new = f"{before}{BEGIN}{model_table()}{END}{after}"
    if options.check:
        print(f"{PAGE} is {'up to date' if new == old else 'out of date: run scripts/model_table.py'}")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
