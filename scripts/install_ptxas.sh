#!/usr/bin/env bash
# usage: install_ptxas.sh PYTHON FILE
# Writes the ptxas that requirements/ptxas.lock pins to FILE, on Linux on x86-64 or ARM. Triton uses this ptxas if
# TRITON_PTXAS_PATH names FILE.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
file=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip download --quiet --no-deps --only-binary=:all: --require-hashes \
    --requirement requirements/ptxas.lock --dest "$work"
"$python" - "$work" "$file" <<'PYTHON'
import pathlib, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
file = pathlib.Path(sys.argv[2])
with zipfile.ZipFile(wheel) as files:
    (name,) = (name for name in files.namelist() if name.endswith("/bin/ptxas"))
    file.write_bytes(files.read(name))
file.chmod(0o755)
PYTHON
"$file" --version | grep release
