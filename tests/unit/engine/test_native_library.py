"""Finding, compiling and loading native kernels: what cannot be used is replaced, or leaves the work to torch."""

import logging
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.native import library
from engine.native.compilers import NATIVE_KERNELS_VARIABLE
from engine.native.instructions import (
    INSTRUCTION_SETS,
    machine_instruction_sets,
    machine_instructions,
)
from engine.native.library import native_library

needs_compiler = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
find = native_library.__wrapped__
"""Without the cache."""


@pytest.fixture(autouse=True)
def one_small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(library, "SOURCES", tmp_path / "source")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(NATIVE_KERNELS_VARIABLE, raising=False)
    monkeypatch.delenv("CXX", raising=False)


def failing_compiler(path: Path, message: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({message!r})\n")
    path.chmod(0o755)
    return str(path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@needs_compiler
def test_a_compiled_library_is_used_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    first = find()
    assert first is not None
    assert first.answer() == 42
    (file,) = (tmp_path / "cache").rglob("*.so")
    written = file.stat().st_mtime_ns
    assert find() is not None
    assert file.stat().st_mtime_ns == written
    assert not warnings(caplog)


@needs_compiler
def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (left := tmp_path / "cache/baton/native/.partial1234").mkdir(parents=True)
    (left / "answer.o").touch()
    assert find() is not None
    assert sorted(path.suffix for path in left.parent.iterdir()) == ["", ".so"], "the lock and the library"


@needs_compiler
def test_a_cache_folder_that_cannot_be_written(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    kernels = find()
    assert kernels is not None
    assert kernels.answer() == 42
    (warning,) = warnings(caplog)
    assert "compiled at every start" in warning


@needs_compiler
@pytest.mark.parametrize("full", [["cache"], ["cache", "temporary"]], ids=len)
def test_full_disks_keep_no_kernels(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: list[str]
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    no_room = [tmp_path / name for name in full]
    monkeypatch.setattr(
        library, "_has_room", lambda folder: not any(Path(folder).is_relative_to(each) for each in no_room)
    )
    made = Mock(side_effect=tempfile.TemporaryDirectory)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", made)
    kernels = find()
    assert kernels is not None
    assert kernels.answer() == 42
    (warning,) = warnings(caplog)
    assert "compiled at every start" in warning
    assert "No space left on device" in warning
    assert not list((tmp_path / "cache/baton/native").iterdir())
    elsewhere = "/dev/shm" if "temporary" in full else str(tmp_path / "temporary")
    assert made.call_args_list[0].kwargs == {"dir": elsewhere}


@needs_compiler
def test_without_a_folder_for_temporary_files_kernels_are_compiled_and_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", Mock(side_effect=FileNotFoundError("none")))
    assert find() is not None
    assert list((tmp_path / "cache").rglob("*.so"))
    assert not warnings(caplog)


@needs_compiler
def test_a_damaged_file_in_the_cache(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    instructions = machine_instructions()
    assert instructions is not None
    folder = tmp_path / "cache" / "baton" / "native"
    folder.mkdir(parents=True)
    (folder / library._file_name(instructions)).write_bytes(b"\x7fELF")
    kernels = find()
    assert kernels is not None
    assert kernels.answer() == 42
    assert len(warnings(caplog)) == 1


@needs_compiler
@pytest.mark.parametrize("content", [None, b"\x7fELF"], ids=["missing", "damaged"])
def test_a_prebuilt_library_that_cannot_be_used_leaves_the_work_to_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    instructions = machine_instructions()
    assert instructions is not None
    file = tmp_path / library._file_name(instructions)
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(NATIVE_KERNELS_VARIABLE, str(tmp_path))
    assert find() is None
    (warning,) = warnings(caplog)
    assert file.name in warning


def test_switched_off_is_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NATIVE_KERNELS_VARIABLE, "off")
    assert find() is None
    assert not warnings(caplog)


@needs_compiler
def test_the_next_compiler_is_tried_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", failing_compiler(tmp_path / "old", "error: too old"))
    kernels = find()
    assert kernels is not None
    assert kernels.answer() == 42
    (warning,) = warnings(caplog)
    assert warning.startswith("the native kernels were compiled by ")
    assert "error: too old" in warning


def test_matrix_units_need_the_permission_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = next(i for i in INSTRUCTION_SETS if "amx_tile" in i.needs)
    monkeypatch.setattr(
        "engine.native.instructions.cpu_flags", lambda: frozenset.union(*(i.needs for i in INSTRUCTION_SETS))
    )
    monkeypatch.setattr("engine.native.instructions.platform.machine", lambda: amx.machine)
    for may_use in (True, False):
        monkeypatch.setattr(
            "engine.native.instructions._may_use_matrix_units", lambda may_use=may_use: may_use
        )
        machine_instruction_sets.cache_clear()
        assert (amx in machine_instruction_sets()) == may_use
        assert len(machine_instruction_sets()) > 1
    machine_instruction_sets.cache_clear()


@needs_compiler
def test_cxx_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = next(path for name in ("c++", "g++", "clang++") if (path := shutil.which(name)))
    monkeypatch.setenv("CXX", f"{shlex.quote(compiler)} -DGIVEN")
    (tmp_path / "source" / "answer.cpp").write_text(
        "#ifndef GIVEN\n#error no argument\n#endif\n" + (tmp_path / "source" / "answer.cpp").read_text()
    )
    assert find() is not None


@needs_compiler
@pytest.mark.parametrize(
    ("cxx", "reason"),
    [
        ("g++ 'x", "No closing quotation"),
        ("/opt/gone/g++ -m64", "program /opt/gone/g++ not found"),
    ],
)
def test_a_cxx_that_is_no_command_is_skipped_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cxx: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    assert find() is not None
    (warning,) = warnings(caplog)
    assert warning == f"CXX={cxx} is ignored: {reason}; correct or unset it"


@needs_compiler
def test_if_none_can_compile_the_log_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("c++", "clang++"):
        failing_compiler(
            tmp_path / "bin" / name, f"In file included from a:\na.h:3: error: {name} is too old\n..."
        )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("engine.native.compilers.find_spec", lambda _: None)
    assert find() is None
    (warning,) = warnings(caplog)
    assert "a.h:3: error: c++ is too old" in warning
    assert "a.h:3: error: clang++ is too old" in warning


@pytest.mark.parametrize(
    ("machine", "flags", "reason"),
    [
        ("x86_64", "fma f16c bmi1 bmi2 abm movbe", "this CPU lacks avx2 (see /proc/cpuinfo)"),
        ("x86_64", "", "the instructions of this CPU are unknown: no flags in /proc/cpuinfo"),
        ("riscv64", "", "Baton has no kernels for processors of type riscv64"),
    ],
)
def test_a_processor_without_the_least_instructions_is_told_what_it_lacks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, reason: str
) -> None:
    monkeypatch.setattr("engine.native.instructions.cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr("engine.native.instructions.platform.machine", lambda: machine)
    machine_instruction_sets.cache_clear()
    assert find() is None
    machine_instruction_sets.cache_clear()
    (warning,) = warnings(caplog)
    assert warning.endswith(f": {reason}")


def test_instruction_sets_need_all_that_their_flags_allow() -> None:
    """`gcc -march=... -Q --help=target` lists the instructions. Here they have the names of /proc/cpuinfo,
    where lzcnt is abm."""
    v3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
    for instructions in INSTRUCTION_SETS:
        if instructions.machine == "x86_64":
            assert v3 <= instructions.needs
        elif "-march=armv8.2-a+dotprod+fp16" in instructions.compiler_flags:
            assert {"asimddp", "fphp", "asimdhp", "atomics"} <= instructions.needs
