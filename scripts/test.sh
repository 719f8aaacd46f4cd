#!/usr/bin/env bash
# Everything CI runs: lint, format, types, tests. Arguments go to pytest (for example: scripts/test.sh tests/hub -x): then
# only lint, format and types run before it, and its tests run one after another.
set -euo pipefail
cd "$(dirname "$0")/.."
# Tests start many processes, and each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE
scripts/setup.sh dev
# One thread a process: with several on a busy machine a small model's forward gets up to twelve times slower.
export OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
if [ $# -gt 0 ]; then
  .venv/bin/mypy
  exec .venv/bin/python -m pytest "$@"
fi

# Types are checked beside the tests, which take a core each: a process holds up to 3 GB.
.venv/bin/mypy & types=$!
trap 'kill $types 2>/dev/null || true' EXIT
# A core that is done takes over from the end of another's: neighbours share their models and servers until then.
parallel=(-n auto --maxprocesses 8 --dist worksteal)
.venv/bin/python -m pytest "${parallel[@]}"
# Triton decides when it is imported whether kernels are compiled or interpreted: their numbers are a process of their own.
TRITON_INTERPRET=1 .venv/bin/python -m pytest "${parallel[@]}" tests/kernels
wait $types
