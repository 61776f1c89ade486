"""The kernels that an outline rehearses while weights load are those that the model will launch."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from baton.errors import ModelError
from engine.gpu.compile_ahead import CompileAhead, compiling_only
from tests.kernels.cases import joined

TIMEOUT_S = 1800.0
"""Of a process, which takes a minute if it has its own core."""

COMPILED = ("--compile", "--architecture=qwen3")
CASES = (
    ("--fp8", "--fp8-cache", "--architecture=qwen2", "--num-ranks=2"),
    COMPILED,
)
BY_HAND = (
    ("--fp8-cache", "--architecture=deepseek_v3", "--num-ranks=2"),
    ("--fp8", "--architecture=qwen3"),
    ("--fp8-cache", "--architecture=qwen2", "--num-ranks=2"),
    ("--fp8", "--architecture=mixtral"),
    ("--fp8", "--architecture=mixtral", "--num-ranks=2", "--expert-parallel"),
    ("--architecture=mixtral", "--num-ranks=2", "--expert-parallel"),
)
Said = dict[tuple[str, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("ahead")
    said = say(CASES, folder)
    said[COMPILED]["kept"] = len([*folder.rglob("*.cubin")])
    return said


def say(cases: Sequence[tuple[str, ...]], folder: Path) -> Said:
    """The kernels that the outline of each case needs. The compiled kernels are kept in the folder.

    A process of its own, which sees no GPU, compiles them: this process interprets or runs kernels, and
    cannot only compile them.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead", *joined(cases)],
        env=kept | {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(folder)},
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout
    return dict(zip(cases, map(json.loads, output.splitlines()[-len(cases) :]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES[:-1], ids=str)
def test_an_outline_wants_every_kernel_that_its_model_wants(said: Said, options: tuple[str, ...]) -> None:
    assert said[options]["ahead"] > 20
    assert said[options]["late"] == []


@pytest.mark.by_hand
def test_so_do_outlines_of_other_cases(tmp_path: Path) -> None:
    said = say(BY_HAND, tmp_path)
    assert {options: case["late"] for options, case in said.items() if case["late"]} == {}
    assert min(case["ahead"] for case in said.values()) > 20


@pytest.mark.slow
def test_they_are_compiled_kept_and_loaded_once(said: Said) -> None:
    compiled = said[COMPILED]
    assert compiled["late"] == []
    assert len(compiled["loaded"]) == len(set(compiled["loaded"])) == compiled["kept"] > 20


def test_only_the_compiling_thread_does_not_run_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[bool] = []
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda self, *args, grid, warmup: launches.append(warmup),  # noqa: ARG005
    )

    def launch() -> None:
        JITFunction.run(None, 1, grid=(1,), warmup=False)

    def launch_elsewhere() -> None:
        other = threading.Thread(target=launch)
        other.start()
        other.join()

    with compiling_only() as kernels:
        launch()
        launch_elsewhere()
    launch()
    assert launches == [True, False, False]
    assert len(kernels) == 1


def test_what_cannot_be_compiled_ahead_is_logged_and_left(caplog: pytest.LogCaptureFixture) -> None:
    def rehearse() -> None:
        raise RuntimeError("no such layout")

    with CompileAhead(rehearse, print, 1):
        pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no such layout" in str(record.exc_info)


def test_a_model_that_cannot_be_loaded_ends_it_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    has_failed = threading.Event()

    def rehearse() -> None:
        has_failed.wait(TIMEOUT_S)
        raise RuntimeError("cannot schedule new futures after shutdown")

    class Loading(CompileAhead):
        def __exit__(self, *args: Any) -> None:
            has_failed.set()
            super().__exit__(*args)

    with pytest.raises(ModelError, match="no weights"), Loading(rehearse, print, 1):
        raise ModelError("no weights")
    assert caplog.records == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]
