#!/usr/bin/env bash
# From nothing to vectors: sets up .venv, pulls the default model, serves it, and finds each sentence's nearest neighbour
# over HTTP. Arguments go to scripts/demo.py (--keep leaves the server running until Ctrl-C).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh gateway
exec .venv/bin/python scripts/demo.py "$@"
