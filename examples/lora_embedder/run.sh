#!/usr/bin/env bash
# From nothing to a served, measured embedder made of a chat model; see docs/worked_example.md. Arguments go to
# scripts/example_lora_embedder.py (--first STEP, --dry-run).
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/setup.sh dev
exec .venv/bin/python scripts/example_lora_embedder.py "$@"
