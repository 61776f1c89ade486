#!/usr/bin/env bash
# usage: gpu_check.sh PYTHON [--dry-run] [--parts NAME,...] [...]
# Everything that needs a CUDA device, or says plainly that there is none; see benchmarks/gpu_check.py.
# PYTHON may be any interpreter that has PyTorch and Triton: what else a part needs and does not find, it names.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
exec "$python" -m benchmarks.gpu_check "$@"
