#!/usr/bin/env bash
# Everything CI runs: lint, format, types, tests. Arguments go to pytest (for example: scripts/test.sh tests/hub -x).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
# One thread a process: with several on a busy machine a small model's forward gets up to twelve times slower.
export OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
# Triton decides when it is imported whether kernels are compiled or interpreted: their numbers are a process of their own.
if [ $# -eq 0 ]; then TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/kernels; fi
