"""Workers as child processes: what they get of this machine, and what remains if their gateway does not start."""

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from baton.config import BatonConfig
from baton.system.cpus import CpuShare
from cluster.serve import child_processes as module
from tests.factories.models import make_model_dir


class Started(Exception):
    """Raised in place of the start of a worker; carries the share of the cores that the worker's process would get."""


@pytest.mark.parametrize(("device", "is_shared"), [("cpu", True), ("cuda", False)])
async def test_only_workers_on_cpus_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, is_shared: bool
) -> None:
    def start(*_: Any, share: CpuShare | None) -> None:
        raise Started(share)

    monkeypatch.setattr(module, "WorkerProcess", start)
    model = make_model_dir(tmp_path / "tiny")
    config = BatonConfig.from_mapping(
        {"model": {"path": str(model), "dtype": "float32"}, "engine": {"device": device}}
    )
    with pytest.raises(Started) as started:
        async with module.child_processes(config, model):
            pass
    (share,) = started.value.args
    assert isinstance(share, CpuShare) is is_shared


class NoPort(Exception):
    """The error of a gateway that does not start."""


async def test_a_gateway_that_does_not_start_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gateway's first port may be open already."""
    worker = Mock(wait_until_ready=lambda: None, stop=lambda: 0)
    gateway = Mock(start=AsyncMock(side_effect=NoPort), stop=AsyncMock())
    monkeypatch.setattr(module, "WorkerProcess", lambda *_, **__: worker)
    monkeypatch.setattr(module, "Tokenizer", lambda _: None)
    monkeypatch.setattr(module, "make_gateway", lambda *_: gateway)
    model = make_model_dir(tmp_path / "tiny")
    config = BatonConfig.from_mapping({"model": {"path": str(model), "dtype": "float32"}})
    with pytest.raises(NoPort):
        async with module.child_processes(config, model):
            pass
    gateway.stop.assert_awaited_once()
