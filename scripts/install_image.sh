#!/usr/bin/env bash
# usage: install_image.sh dependencies cpu|cuda
#        install_image.sh baton
# The two installing steps of the Dockerfile, for the environment whose `python` is first on the PATH. The first step installs
# what Baton needs to run, in the versions of requirements/cpu.lock. The second step installs Baton itself.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/cpu.lock
cpu_index=https://download.pytorch.org/whl/cpu

locked() { sed -n "s/^$1==//p" "$lock"; }

# Prints the requirements of pyproject.toml and of its extras `otel` and `redis`, but not torch: torch is installed before, and may
# come from another index.
requirements() {
    python -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + extras["otel"] + extras["redis"]
print(*(line for line in wanted if not line.startswith("torch>")), sep="\n")'
}

case ${1:-} in
dependencies)
    python -m pip install "pip==$(locked pip)" "setuptools==$(locked setuptools)"
    case ${2:-} in
    cpu)
        if ! python -m pip install --extra-index-url "$cpu_index" --no-deps "torch==$(locked torch)+cpu"; then
            echo "Found no CPU build of torch $(locked torch); installing the default build, which may be large." >&2
            python -m pip install --constraint "$lock" "torch==$(locked torch)"
        fi
        ;;
    cuda)
        python -m pip install "torch==$(locked torch)"
        scripts/install_ptxas.sh python "$(dirname "$(command -v python)")/ptxas"
        # Installs NIXL in the version that the extra `nixl` pins, for the CUDA version for which PyTorch is built.
        nixl=$(sed -n 's/^nixl = \["nixl-cu12==\([0-9.]*\);.*/\1/p' pyproject.toml)
        cuda=$(python -c 'import torch; print(torch.version.cuda.partition(".")[0])')
        python -m pip install --constraint "$lock" "nixl-cu$cuda==$nixl"
        ;;
    *) echo "install_image.sh: expected cpu or cuda, got '${2:-}'" >&2 && exit 2 ;;
    esac
    requirements | python -m pip install --constraint "$lock" --requirement /dev/stdin
    ;;
baton) python -m pip install --no-deps --no-build-isolation . ;;
*) echo "install_image.sh: expected dependencies or baton, got '${1:-}'" >&2 && exit 2 ;;
esac
