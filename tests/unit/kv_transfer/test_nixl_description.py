"""How a NIXL reader checks a peer's description before NIXL sees it."""

import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from kv_transfer.transport import nixl_agent
from kv_transfer.transport.base import MAX_DESCRIPTION_BYTES, TransportError
from kv_transfer.transport.nixl_agent import NixlMemory, load_nixl, nixl_is_available
from kv_transfer.transport.nixl_description import Description, check_readable, decode, encode, this_host

POOL = np.zeros(4096, np.uint8)
OURS = Description(
    nixl_version="1.5.1",
    host="here",
    pid=os.getpid(),
    has_rdma=False,
    address=POOL.ctypes.data,
    nbytes=POOL.nbytes,
    is_on_device=False,
    device=0,
    agent="a",
    metadata=bytes(range(256)),
)


def test_a_description_comes_back_as_it_was() -> None:
    assert decode(encode(OURS)) == OURS
    assert OURS.memory == NixlMemory.of(POOL)
    assert replace(OURS, is_on_device=True, device=3).memory.kind == "VRAM"


@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    sound = encode(OURS)
    place = data.draw(st.integers(0, len(sound) - 1))
    damaged = bytearray(sound)
    damaged[place] ^= data.draw(st.integers(1, 255))
    for description in (bytes(damaged), sound[:place], sound + b"\0"):
        with pytest.raises(TransportError, match="damaged"):
            decode(description)


@pytest.mark.slow
@given(st.binary(max_size=600))
def test_noise_is_no_description(noise: bytes) -> None:
    with pytest.raises(TransportError):
        decode(noise)


def test_a_description_beyond_the_limit_is_not_looked_at() -> None:
    with pytest.raises(TransportError, match="are allowed"):
        decode(bytes(MAX_DESCRIPTION_BYTES + 1))


@pytest.mark.parametrize(
    "lie",
    [
        {"nbytes": 0},
        {"nbytes": -1},
        {"address": 0},
        {"address": 2**64 - 1, "nbytes": 2},
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**31},
        {"device": -1},
    ],
)
def test_a_sealed_lie_is_refused(lie: dict[str, int]) -> None:
    with pytest.raises(TransportError, match="invalid memory range"):
        decode(encode(replace(OURS, **lie)))  # type: ignore[arg-type]


def test_another_host_needs_rdma_on_both_ends() -> None:
    with_rdma = replace(OURS, has_rdma=True)
    with_rdma.check_reachable("there", has_rdma=True)
    for description, has_rdma in ((OURS, True), (with_rdma, False), (OURS, False)):
        with pytest.raises(TransportError, match="RDMA"):
            description.check_reachable("there", has_rdma)


@pytest.mark.skipif(sys.platform != "linux", reason="needs process_vm_readv")
def test_memory_on_this_host_must_be_readable() -> None:
    OURS.check_reachable("here", has_rdma=False)
    with pytest.raises(TransportError, match="Bad address"):
        check_readable(os.getpid(), 1)
    with pytest.raises(TransportError, match="No such process"):
        check_readable(2**22 + 1, POOL.ctypes.data)  # above the system's largest pid
    assert this_host() == this_host()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl_cu12", "nixl_cu13", "nixl_cu12._bindings", "nixl_cu13._bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    nixl_agent.load_nixl.cache_clear()
    try:
        assert not nixl_is_available()
        with pytest.raises(ConfigError, match=r"pip install 'baton\[nixl\]'"):
            load_nixl()
    finally:
        nixl_agent.load_nixl.cache_clear()
