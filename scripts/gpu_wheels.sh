#!/usr/bin/env bash
# usage: gpu_wheels.sh [FOLDER [LIST]]      (default .gpu-wheels, which git ignores, and requirements/gpu-wheels.txt)
# Collects what a GPU machine without a network needs in addition to PyTorch, Triton and transformers: the packages of LIST
# as wheels for CPython 3.12 on x86-64, in the versions of requirements/cpu.lock. With the default list, also a newer ptxas
# than Triton's (see docs/gpu.md). Prints the folder's size.
#
# On that machine:
#        python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl; export PYTHONPATH=SITE
#        export TRITON_PTXAS_PATH=FOLDER/ptxas (gunzip it and make it executable first)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.gpu-wheels}
list=${2:-requirements/gpu-wheels.txt}
mapfile -t packages < <(grep -v "^#" "$list")
ptxas=$(sed -n 's/^\(nvidia-cuda-nvcc==[0-9.]*\).*/\1/p' requirements/ptxas.lock)
platforms=()
for version in 2_34 2_31 2_28 2_26 2_24 2_17 2_12 2_5; do
    platforms+=(--platform "manylinux_${version}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

fetch() { # fetch FOLDER REQUIREMENT...
    PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" --dest "$1" "${@:2}"
}

rm -rf "$folder"
mkdir -p "$folder"
for package in "${packages[@]}"; do
    pin=$(grep -E "^$package==" requirements/cpu.lock) || {
        echo "gpu_wheels.sh: requirements/cpu.lock does not pin $package" >&2
        exit 1
    }
    fetch "$folder" "$pin"
done
if [ "$list" = requirements/gpu-wheels.txt ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    fetch "$work" "$ptxas"
    python3 - "$work" "$folder" <<'PYTHON'
import gzip, pathlib, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    (name,) = (name for name in files.namelist() if name.endswith("/bin/ptxas"))
    (pathlib.Path(sys.argv[2]) / "ptxas.gz").write_bytes(gzip.compress(files.read(name), 9, mtime=0))
PYTHON
fi
du -sm --apparent-size "$folder" | awk '{ print $1 " MiB in " $2 }'
