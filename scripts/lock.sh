#!/usr/bin/env bash
# Rewrites requirements/cpu.lock with the newest versions that pyproject.toml allows. pip resolves them in a new environment.
# PyTorch keeps its pinned version (edit the lock by hand to change it), and CUDA packages stay out. Needs the oldest Python that
# Baton supports: newer Pythons get newer versions of some packages, which no longer support the oldest one.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/cpu.lock
torch=$(sed -n 's/^torch==//p' "$lock")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$(PYTHON=${PYTHON:-python3.11} scripts/find_python.sh)" -m venv "$work/venv"
python=$work/venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip install --quiet --upgrade pip setuptools
scripts/install_torch.sh "$python" "$torch"
"$python" -m pip install --quiet --editable ".[dev]"
{
    echo "# What CI proves, on Python 3.11 without a GPU. Written by \`make lock\`; ranges are in pyproject.toml."
    echo "# scripts/install_torch.sh installs torch first, so that the CPU build satisfies its line here."
    "$python" -m pip freeze --all --exclude-editable |
        sed 's/^\(torch==[^+]*\)+.*/\1/' |
        grep -viE '^(nvidia-|triton|cuda-|wheel==)'
} >"$work/lock"
mv "$work/lock" "$lock"
echo "$lock: $(grep -c == "$lock") packages"
