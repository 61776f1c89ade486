#!/usr/bin/env bash
# Regenerates baton/v1 from protos/. With --check, fails if what is checked in differs from what would be generated.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

PATH="$(dirname "$(command -v "$python")"):$PATH" "$python" -m grpc_tools.protoc -I protos \
    --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
    protos/baton/v1/*.proto

if [ "${1:-}" = "--check" ]; then
    diff -r --exclude=__init__.py --exclude=__pycache__ "$out/baton/v1" baton/v1 ||
        { echo "baton/v1 is not what protos/ generates: run \`make protos\`" >&2; exit 1; }
else
    rm -f baton/v1/*_pb2*
    cp "$out"/baton/v1/* baton/v1/
fi
