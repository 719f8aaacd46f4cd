#!/usr/bin/env bash
# Usage: scripts/setup.sh EXTRA   (EXTRA: gateway = what serving needs, dev = what the tests need; dev contains gateway)
# Makes .venv and installs ROSE with that extra into it. Does nothing, and needs no network, once that has been done for
# the present pyproject.toml and constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:?usage: scripts/setup.sh EXTRA}
python=${PYTHON:-python3}

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

wanted=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
done_for() { [ -x .venv/bin/python ] && [ "$(cat ".venv/.rose-setup-$1" 2>/dev/null)" = "$wanted" ]; }
if done_for "$extra" || { [ "$extra" = gateway ] && done_for dev; }; then exit 0; fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  command -v "$python" >/dev/null || fail "there is no $python. Install it with: apt-get install python3 python3-venv"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: ROSE needs Python 3.11 or newer (choose one with PYTHON=python3.11 $0 $extra)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make virtual environments. Install what it lacks with: apt-get install python3-venv"
  echo "setup: making .venv"
  "$python" -m venv .venv
fi

# 22.2 is the oldest pip that installs an editable project with extras under constraints as we need it.
if ! .venv/bin/python -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (22, 2))'; then
  .venv/bin/python -m pip install --quiet --upgrade pip
fi

echo "setup: installing ROSE with [$extra] (the first time downloads PyTorch, about 200 MB for its CPU build)"
options=(); [ -t 1 ] || options=(--quiet)
# Turning all of PyTorch and the rest into bytecode takes half of the whole set-up, on one core; Python does it by itself for
# the few files that are imported, unless it is forbidden to keep bytecode: then every start would do it again, 3 s for
# PyTorch and 10 s for transformers.
[ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || options+=(--no-compile)
.venv/bin/python -m pip install "${options[@]}" --disable-pip-version-check \
  --constraint constraints.txt --editable ".[$extra]" ||
  fail "pip could not install everything (its reason is above); with a network, run this again"
printf '%s' "$wanted" > ".venv/.rose-setup-$extra"
