#!/usr/bin/env bash
# usage: install_triton.sh PYTHON
# Installs Triton for the tests of the kernels, unless it is installed: PyTorch's CUDA builds install Triton.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
if "$python" -c "import triton" 2>/dev/null; then
    exit 0
fi
echo "Installing Triton, to interpret and compile the GPU kernels: 290 MB, once."
PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install --quiet --no-compile --no-deps --requirement requirements/kernels.lock
