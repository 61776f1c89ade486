#!/usr/bin/env bash
# usage: install.sh VENV
# Builds the virtual environment from requirements/cpu.lock and installs this checkout into it, editable. An environment that is
# there keeps its Python.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
lock=requirements/cpu.lock

locked() { sed -n "s/^$1==//p" "$lock"; }

present=
if [ -x "$venv/bin/python" ]; then present=$venv/bin/python; fi
python=$(PYTHON=${PYTHON:-$present} scripts/find_python.sh)
if [ -n "$present" ] && [ "$("$present" --version)" != "$("$python" --version)" ]; then
    echo "$venv has $("$present" --version), but PYTHON=$PYTHON is $("$python" --version): remove $venv, or leave out PYTHON." >&2
    exit 1
fi
echo "Setting up $venv with $("$python" --version); the first time takes a few minutes."
[ -n "$present" ] || "$python" -m venv "$venv"
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip install --quiet "pip==$(locked pip)" "setuptools==$(locked setuptools)"
scripts/install_torch.sh "$python" "$(locked torch)"
# Most modules are never imported. Python compiles the others when they are first imported.
"$python" -m pip install --quiet --no-compile --requirement "$lock"
"$python" -m pip install --quiet --no-deps --no-build-isolation --editable .
