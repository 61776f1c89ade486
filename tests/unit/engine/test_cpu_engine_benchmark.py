"""What the CPU engine's benchmark refuses to measure under a wrong name."""

import sys
from pathlib import Path

import pytest

from benchmarks.cpu_engine import main
from tests.factories.models import make_model_dir


def test_a_model_that_is_no_gguf_file_has_no_row_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_dir(tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(sys, "argv", ["cpu_engine", "--model", str(model), "--quantizations", "gguf"])
    with pytest.raises(SystemExit, match=r"--quantizations gguf: .* is no GGUF file"):
        main()
