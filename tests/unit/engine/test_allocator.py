"""Which freed memory the process keeps, and how much memory is available."""

import os
import platform
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from baton.clock import SystemClock
from baton.config import BatonConfig
from engine import allocator
from engine.allocator import (
    available_memory,
    keep_freed_memory,
    return_freed_memory,
    returning_freed_memory,
)
from engine.build import build_device_engine
from engine.collectives import SINGLE_RANK
from engine.loading.footprint import footprint
from tests.factories.models import make_model_dir


def test_glibc_takes_the_settings() -> None:
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() is is_glibc
    assert bytearray(50 * 2**20).count(0) == 50 * 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_only_loading_needed_is_given_back(tmp_path: Path) -> None:
    """A table of 64 MiB in float32 is loaded from bfloat16, and packed in bfloat16."""
    folder = make_model_dir(tmp_path, vocab_size=2**18, dtype="bfloat16", tie_word_embeddings=True)
    config = BatonConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "engine": {"num_threads": torch.get_num_threads()},
            "scheduler": {"num_blocks": 65, "max_model_len": 1024},
        }
    )
    return_freed_memory()
    before = own_memory()
    engine = build_device_engine(
        config, None, folder, "incarnation", SINGLE_RANK, SystemClock(), Mock(), Mock()
    )
    added = own_memory() - before
    engine.connector.shutdown()
    engine.free()
    assert added < 1.25 * footprint(config, folder).weight_bytes


def test_freed_memory_is_given_back_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the buffers of all layers add up, since glibc cannot use a hole again for an aligned buffer."""
    returned, reported = Mock(), Mock()
    monkeypatch.setattr(allocator, "return_freed_memory", returned)
    monkeypatch.setattr(allocator, "RETURN_EVERY_BYTES", 100)
    on_loaded = returning_freed_memory(reported)
    counts = []
    for loaded in (60, 99, 100, 150, 199, 260, 360):
        on_loaded(loaded, 360)
        counts.append(returned.call_count)
    assert counts == [0, 0, 1, 1, 1, 2, 3]
    assert [call.args for call in reported.call_args_list][-1] == (360, 360)
    assert reported.call_count == len(counts)


def test_a_worker_returns_memory_for_every_model_that_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = Mock()
    monkeypatch.setattr(allocator, "return_freed_memory", returned)
    monkeypatch.setattr(allocator, "RETURN_EVERY_BYTES", 1)
    folder = make_model_dir(tmp_path)
    num_tensors = len(load_file(folder / "model.safetensors"))
    config = BatonConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "engine": {"num_threads": torch.get_num_threads()},
            "scheduler": {"num_blocks": 65},
            "speculation": {"method": "draft_model", "draft_model": str(folder)},
        }
    )
    engine = build_device_engine(
        config, None, folder, "incarnation", SINGLE_RANK, SystemClock(), Mock(), Mock()
    )
    engine.connector.shutdown()
    engine.free()
    assert returned.call_count == 2 * num_tensors


def own_memory() -> int:
    """Bytes of this process' memory that is neither shared nor a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_what_is_available_is_less_than_all_and_more_than_nothing() -> None:
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() < everything


GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "cgroup", "files", "room"),
    [
        ("8388608 kB", "0::/", {}, 8 * GIB),
        ("8388608 kB", "0::/", {"max": "max", "current": GIB, "stat": ""}, 8 * GIB),
        (
            "8388608 kB",
            "0::/",
            {"max": 4 * GIB, "current": GIB, "stat": "active_file 5\ninactive_file 6"},
            3 * GIB + 11,
        ),
        (
            "1048576 kB",
            "0::/",
            {"max": 4 * GIB, "current": GIB, "stat": "active_file 5\ninactive_file 6"},
            GIB,
        ),
        (
            "8388608 kB",
            "0::/gone",
            {"max": GIB, "current": 2 * GIB, "stat": "active_file 0\ninactive_file 0"},
            0,
        ),
        ("8388608 kB", "0::/", {"max": GIB, "current": 0, "stat": "torn"}, 8 * GIB),
        (
            "8388608 kB",
            "4:memory:/docker/id",
            {
                "limit_in_bytes": 2 * GIB,
                "usage_in_bytes": GIB,
                "stat": "active_file 1\ninactive_file 1\ntotal_active_file 5\ntotal_inactive_file 6",
            },
            GIB + 11,
        ),
    ],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, memory: str, cgroup: str, files: dict[str, object], room: int
) -> None:
    folder = tmp_path / "sys/fs/cgroup" / ("memory" if "memory" in cgroup else "")
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 7 kB\nMemAvailable: {memory}\n")
    assert available_memory(tmp_path) == room


def test_a_limit_that_may_not_be_looked_at_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 7 kB\n")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError("Permission denied")))
    assert available_memory(tmp_path) == 7 * 1024
