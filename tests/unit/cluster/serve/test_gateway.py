"""What a command checks of its gateway before the workers start, and what a gateway keeps in memory."""

import json
import platform
import resource
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from baton.config import BatonConfig
from cluster.serve.gateway import check_access
from gateway.open_files import fitted_to_open_files
from tests.factories.models import make_model_dir


def test_the_check_leaves_the_warning_of_few_open_files_to_the_gateway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    config = BatonConfig.from_mapping({"gateway": {"grpc_port": 0, "http_port": 0}})
    check_access(config)
    assert caplog.messages == []
    fitted_to_open_files(config.gateway)
    assert len(caplog.messages) == 1


_PROGRAM = """
import asyncio
import sys
from pathlib import Path
from baton.config import BatonConfig
from baton.system.curve import derive_keys
from cluster.serve.gateway import load_tokenizer, make_gateway
from engine.allocator import return_freed_memory

def own_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

async def make() -> None:
    folder = Path(sys.argv[1])
    config = BatonConfig.from_mapping({"model": {"dtype": "float32"}, "network": {"security": "none"}})
    gateway = make_gateway(config, derive_keys(None), folder, load_tokenizer(config, folder))
    held = own_memory()
    return_freed_memory()
    print(held - own_memory())
    await gateway.stop(0.0)

asyncio.run(make())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_only_reading_the_tokenizer_needed_is_given_back(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path)
    _add_tokens(folder / "tokenizer.json", 60_000)
    command = [sys.executable, "-c", _PROGRAM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 * 1024  # KiB


def _add_tokens(file: Path, num_tokens: int) -> None:
    """Adds merged pairs of bytes to the vocabulary of a tokenizer.json."""
    tokenizer = json.loads(file.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    letters = [text for text in vocabulary if len(text) == 1]
    pairs = ([first, second] for first in letters for second in letters if first + second not in vocabulary)
    for first, second in islice(pairs, num_tokens):
        vocabulary[first + second] = len(vocabulary)
        merges.append([first, second])
    file.write_text(json.dumps(tokenizer))
