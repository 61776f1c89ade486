"""Runs the tests marked `gpu` outside tests/kernels: weights, fp8, and CUDA IPC between processes."""

from benchmarks.gpu.pytest_run import ROOT, run_pytest
from benchmarks.gpu.setting import Emit, Setting

PART = "marked"


def run(setting: Setting, emit: Emit) -> None:
    """Runs the marked tests. A dry run collects all of them, but runs only two."""
    arguments = _marked_files()
    arguments += ["-k", "bytes_are_a_view or a_pool_lives"] if setting.is_dry else ["-m", "gpu"]
    for row in run_pytest(setting, PART, "tests marked gpu", arguments):
        emit(row)


def _marked_files() -> list[str]:
    """The files with marked tests. Other files are not collected, since they may need missing packages."""
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.parent.name != "kernels"]
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]
