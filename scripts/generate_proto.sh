#!/usr/bin/env bash
# Regenerates rose/proto/*_pb2* from rose.proto with the oldest protobuf we support, so that every newer runtime reads it.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(mktemp -d); trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools/venv"
"$tools/venv/bin/pip" install -q grpcio-tools==1.76.0 setuptools mypy-protobuf==3.7.0
PATH="$tools/venv/bin:$PATH" "$tools/venv/bin/python" -m grpc_tools.protoc -I. \
  --python_out=. --grpc_python_out=. --mypy_out=. rose/proto/rose.proto
