"""What the chart starts really serves: a rendered release, played on this machine without Kubernetes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.chart import ROOT, Object, needs_helm, render
from tests.factories.models import make_model_dir

VALUES: Object = {
    "device": "cpu",
    "model": {"path": "/home/models/tiny", "mountPath": "/home/models", "existingClaim": "weights"},
    "config": {"engine": {"num_threads": 1, "kv_cache_memory_mib": 64}, "model": {"dtype": "float32"}},
    "decode": {"replicas": 2},
    "drain": {"timeoutSeconds": 5},
    "controller": {"startTimeoutSeconds": 300},
}


@needs_helm
@pytest.mark.by_hand
def test_a_rendered_release_serves_drains_and_stops(tmp_path: Path) -> None:
    make_model_dir(tmp_path / "models" / "tiny")
    rendered = tmp_path / "rendered.json"
    rendered.write_text(json.dumps(render(VALUES).objects))
    program = [sys.executable, "-m", "tests.slow.play_chart", str(rendered), str(tmp_path / "models")]
    done = subprocess.run(
        [ROOT / "tests" / "slow" / "isolated.sh", *program],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result, indent=2))  # pytest -rP shows it
    assert result["before"] == result["after"] != ""
    assert result["drain"][0] == 0, result["drain"][1]
    assert result["codes"]["gateway"] == {"gateway": 0}
