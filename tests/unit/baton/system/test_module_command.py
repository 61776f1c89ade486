"""What a module that Baton starts may import."""

import subprocess
from pathlib import Path

from baton.system.module_command import module_command


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "timeit.py").write_text("raise ImportError('a file of strangers')")
    command = module_command("timeit", "--number", "1", "--repeat", "1", "pass")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
