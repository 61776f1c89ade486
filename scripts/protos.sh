#!/usr/bin/env bash
# Generates Python from protos/ again: baton/v1 for Baton's own API, gateway/grpc/generated for APIs of other projects. The
# package names of those APIs (vllm, smg) are also names of packages on PyPI, so the code does not use them. With --check,
# fails if the committed files differ from the generated ones.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

PATH="$(dirname "$(command -v "$python")"):$PATH" "$python" -m grpc_tools.protoc -I protos \
    --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
    protos/baton/v1/*.proto protos/vllm/grpc/engine/*.proto protos/smg/grpc/common/*.proto

# A file without a service needs no code for gRPC.
grep -L "class .*Stub" "$out"/*/*/*_grpc.py* "$out"/*/*/*/*_grpc.py* | xargs -r rm

others=gateway/grpc/generated
mkdir -p "$out/$others"
mv "$out"/vllm/grpc/engine/* "$out"/smg/grpc/common/* "$out/$others/"
sed -i -E 's/\b(vllm\.grpc\.engine|smg\.grpc\.common)(\.[a-z_]+_pb2|\b import\b)/gateway.grpc.generated\2/' "$out/$others"/*.py*

if [ "${1:-}" = "--check" ]; then
    for folder in baton/v1 "$others"; do
        diff -r --exclude=__init__.py --exclude=__pycache__ "$out/$folder" "$folder" ||
            { echo "$folder is not what protos/ generates: run \`make protos\`" >&2; exit 1; }
    done
else
    for folder in baton/v1 "$others"; do
        rm -f "$folder"/*_pb2*
        cp "$out/$folder"/* "$folder/"
    done
fi
