#!/usr/bin/env bash
# usage: gpu_check.sh PYTHON
# Runs the tests that need a CUDA device, or says plainly that there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu-check: skipped, torch $("$python" -c 'import torch; print(torch.__version__)') sees no CUDA device"
    exit 0
fi
exec "$python" -m pytest -m gpu
