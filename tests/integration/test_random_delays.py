"""`make racy-tests`: it fails tests that depend on the speed of tasks, and no others."""

import os
import subprocess
import sys
from pathlib import Path

from tests.test_architecture import ROOT

TESTS = """
import asyncio

async def count(counts):
    await asyncio.sleep(0)
    counts.append(1)

async def looks_after_a_moment():
    counts = []
    task = asyncio.create_task(count(counts))
    await asyncio.sleep(0.005)
    assert counts
    await task

async def waits():
    counts = []
    await asyncio.create_task(count(counts))
    assert counts

async def many_times(test):
    for _ in range(300):
        await test()

def test_racy():
    asyncio.run(many_times(looks_after_a_moment))

def test_sound():
    asyncio.run(many_times(waits))
"""


def test_a_racy_test_fails_and_a_sound_one_passes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.random_delays", "-p", "no:cacheprovider", "-rA"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "RANDOM_DELAYS_SEED=" in run.stdout
    assert "FAILED test_it.py::test_racy" in run.stdout
    assert "PASSED test_it.py::test_sound" in run.stdout
