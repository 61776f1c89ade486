"""Which transports are offered: the configured one, or an error; with `auto`, all that work here."""

from typing import Any

import numpy as np
import pytest

from baton.clock import VirtualClock
from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.cuda.driver import CudaError
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.pool import DeviceBlocks
from kv_transfer.transport import choice
from kv_transfer.transport.base import Bytes, TransportError
from kv_transfer.transport.choice import make_readers
from tests.factories.fake_cuda import FakeDriver, FakeHost

NBYTES = 4096


class FakeNixl:
    """A NixlReader that can be set up, or not; says with which memory."""

    name = "nixl"
    failure: str | None = None

    def __init__(self, memory: Any, _clock: Any, make_current: Any = None) -> None:
        if self.failure is not None:
            raise TransportError(self.failure)
        self.memory, self.make_current = memory, make_current


@pytest.fixture(autouse=True)
def _nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "NixlReader", FakeNixl)
    monkeypatch.setattr(choice, "has_rdma", lambda: True)
    monkeypatch.setattr(choice, "nixl_is_available", lambda: True)
    monkeypatch.setattr(FakeNixl, "failure", None)


def on_device(driver: FakeDriver | None = None) -> DeviceBlocks:
    return DeviceBlocks(CudaMemory(NBYTES, 3, driver or FakeDriver(FakeHost(), device=3)), 64)


def in_host_memory() -> Bytes:
    return np.zeros((64, 64), np.uint8)


def names(transport: str, blocks: Bytes | DeviceBlocks) -> list[str]:
    config = KVTransferConfig().with_values("test", transport=transport)
    return [reader.name for reader in make_readers(config, blocks, None, VirtualClock())]


def test_what_the_memory_allows_is_offered_the_best_first() -> None:
    assert names("auto", on_device()) == ["cuda_ipc", "nixl"]
    assert names("auto", in_host_memory()) == ["shared_memory", "nixl"]
    for transport in ("cuda_ipc", "nixl"):
        assert names(transport, on_device()) == [transport]
    assert names("zmq_tcp", on_device()) == names("zmq_tcp", in_host_memory()) == []


def test_nixl_is_taken_unasked_only_where_there_is_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_rdma", lambda: False)
    assert names("auto", on_device()) == ["cuda_ipc"]
    assert names("nixl", on_device()) == ["nixl"]


@pytest.mark.parametrize(
    ("transport", "where"), [("shared_memory", "on a device"), ("cuda_ipc", "in host memory")]
)
def test_what_cannot_read_such_memory_is_refused(transport: str, where: str) -> None:
    blocks = on_device() if where == "on a device" else in_host_memory()
    with pytest.raises(ConfigError, match=f"{transport} cannot move KV that is {where}"):
        names(transport, blocks)


def test_nixl_on_a_device_registers_its_memory_in_its_context() -> None:
    driver = FakeDriver(FakeHost(), device=3)
    blocks = on_device(driver)
    [reader] = make_readers(KVTransferConfig(transport="nixl"), blocks, None, VirtualClock())
    assert isinstance(reader, FakeNixl)
    assert (reader.memory.kind, reader.memory.device) == ("VRAM", 3)
    assert (reader.memory.address, reader.memory.nbytes) == (blocks.memory.address, NBYTES)
    reader.make_current()
    assert driver.num_made_current == 1


def test_a_ucx_without_cuda_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeNixl, "failure", "NIXL: NIXL_ERR_BACKEND")
    with pytest.raises(ConfigError, match=r"nixl cannot be set up here: .*BACKEND; .* UCX with CUDA support"):
        names("nixl", on_device())
    assert names("auto", on_device()) == ["cuda_ipc"]
    assert "KV transport not available: nixl" in caplog.text


def test_a_system_that_shares_no_device_memory_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_address: int) -> bytes:
        raise CudaError("cuIpcGetMemHandle: operation not supported (801)")

    driver = FakeDriver(FakeHost(), device=3)
    monkeypatch.setattr(driver, "share", refuse)
    assert names("auto", on_device(driver)) == ["nixl"]
    assert "cuda_ipc cannot be set up here: cuIpcGetMemHandle" in caplog.text
    with pytest.raises(ConfigError, match=r"cuda_ipc cannot be set up here: .*\(801\)"):
        names("cuda_ipc", on_device(driver))
