"""The examples run as their docs say."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.factories.models import make_model_dir

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_schedulers_pictures_are_drawn_from_real_runs(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "model")
    out = tmp_path / "images"
    command = [sys.executable, "examples/draw_scheduler.py", "--model", str(model), "--out", str(out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in (ROOT / "docs/images").iterdir()}
    assert all(ET.parse(out / name).getroot().tag.endswith("svg") for name in names)
    assert "preempted" in result.stdout
    assert "waits for KV from another worker" in result.stdout
