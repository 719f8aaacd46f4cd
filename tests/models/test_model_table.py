"""docs/models.md: its table is the registry's, and every class in it is one that is served."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rose.models.registry import BACKBONES
from rose.models.table import model_table

ROOT = Path(__file__).parent.parent.parent


def test_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/model_table.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_class_has_its_row():
    rows = model_table().splitlines()[2:]
    for model_type, entry in BACKBONES.items():
        for name in (*entry.architectures, *entry.classifiers):
            own = [row for row in rows if row.startswith(f"| `{name}` | `{model_type}` |")]
            assert own, name
            assert all(entry.attention in row and all(dtype in row for dtype in entry.dtypes) for row in own)
            assert all(("float16 refused" in row) == bool(entry.refused) for row in own)
        named = set(re.findall(r"`(test_\w+\.py)`", "".join(rows)))
        assert all((ROOT / "tests/models" / file).exists() for file in named)
    assert len({row.count("|") for row in rows}) == 1
