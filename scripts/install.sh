#!/usr/bin/env bash
# usage: install.sh VENV
# Builds the virtual environment from requirements/cpu.lock and installs this checkout into it, editable.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
lock=requirements/cpu.lock

locked() { sed -n "s/^$1==//p" "$lock"; }

python=$(scripts/find_python.sh)
echo "Setting up $venv with $("$python" --version); the first time takes a few minutes."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip install --quiet "pip==$(locked pip)" "setuptools==$(locked setuptools)"
scripts/install_torch.sh "$python" "$(locked torch)"
# Most modules are never imported. Python compiles the others when they are first imported.
"$python" -m pip install --quiet --no-compile --requirement "$lock"
"$python" -m pip install --quiet --no-deps --no-build-isolation --editable .
