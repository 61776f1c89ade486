#!/usr/bin/env bash
# usage: gpu_check.sh PYTHON [--dry-run] [--parts NAME,...] [...]
# Runs everything that needs a CUDA device, or says that there is none; see benchmarks/gpu_check.py.
# PYTHON may be any interpreter that has PyTorch and Triton. A part that lacks another package names the package.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
exec "$python" -m benchmarks.gpu_check "$@"
