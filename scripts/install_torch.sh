#!/usr/bin/env bash
# usage: install_torch.sh PYTHON VERSION
# Installs PyTorch: the default build if the machine has an NVIDIA GPU, else the CPU build, which is ten times smaller.
set -euo pipefail
python=$1 version=$2
cpu_index=https://download.pytorch.org/whl/cpu

if "$python" -c "import sys, torch; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null; then
    exit 0
fi
if nvidia-smi -L >/dev/null 2>&1; then
    exec "$python" -m pip install --quiet --no-compile "torch==$version"
fi
# The local version `+cpu` excludes CUDA builds, whichever other indexes pip uses. --no-deps: the lock has the packages that this
# build needs.
if ! "$python" -m pip install --quiet --no-compile --retries 1 --timeout 20 --no-deps \
    --extra-index-url "$cpu_index" "torch==$version+cpu"; then
    echo "Found no CPU build of torch $version; installing the default build, which may be large." >&2
    exec "$python" -m pip install --quiet --no-compile "torch==$version"
fi
