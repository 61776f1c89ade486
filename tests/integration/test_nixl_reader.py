"""NixlReader beyond what every PoolReader promises; needs the NIXL library."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.clock import SystemClock
from kv_transfer.transport.base import TransportError
from kv_transfer.transport.nixl import NixlReader
from kv_transfer.transport.nixl_agent import NixlMemory, has_rdma, nixl_is_available
from kv_transfer.transport.nixl_description import decode, encode
from tests.factories.pool_readers import Owner, finish, make_runs

pytestmark = pytest.mark.skipif(not nixl_is_available(), reason="pip install 'baton[nixl]'")

NBYTES = 2**24
WHOLE = make_runs((0, 0, NBYTES))


@pytest.fixture
def reader() -> Iterator[NixlReader]:
    pool = np.zeros(NBYTES, np.uint8)
    reader = NixlReader(NixlMemory.of(pool), SystemClock())
    yield reader
    reader.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner("nixl", NBYTES, seed=1) as owner:
        yield owner


def test_what_a_sealed_description_claims_is_checked(owner: Owner, reader: NixlReader) -> None:
    true = decode(owner.description)
    for lie, match in (
        (replace(true, nixl_version="0.1"), "has NIXL 0.1"),
        (replace(true, host="elsewhere", has_rdma=False), "RDMA"),
        (replace(true, metadata=b"not NIXL's"), "NIXL"),
    ):
        with pytest.raises(TransportError, match=match):
            reader.open(encode(lie))
    assert finish(reader, [number := reader.open(owner.description).read(WHOLE)]) == {number: None}


def test_a_name_cannot_be_taken_over(owner: Owner, reader: NixlReader) -> None:
    remote = reader.open(owner.description)
    with pytest.raises(TransportError, match="already known with another description"):
        reader.open(encode(replace(decode(owner.description), nbytes=1)))
    assert finish(reader, [number := remote.read(WHOLE)]) == {number: None}


def test_memory_that_the_owner_did_not_register_is_refused(owner: Owner, reader: NixlReader) -> None:
    true = decode(owner.description)
    remote = reader.open(encode(replace(true, nbytes=true.nbytes * 2)))
    with pytest.raises(TransportError, match="NIXL"):
        remote.read(make_runs((NBYTES, 0, 4096)))
    assert finish(reader, [number := remote.read(WHOLE)]) == {number: None}


def test_a_failed_pool_stays_failed_until_it_is_opened_anew(owner: Owner, reader: NixlReader) -> None:
    remote = reader.open(owner.description)
    owner.kill()
    number = remote.read(WHOLE)
    assert finish(reader, [number])[number] is not None
    with pytest.raises(TransportError, match="cannot read the pool of process"):
        remote.read(WHOLE)


def test_a_restart_of_the_agent_ends_all_reads(owner: Owner, reader: NixlReader) -> None:
    """There is no other way to end a read from a stopped peer. Reads from other peers then end with an error."""
    with Owner("nixl", NBYTES, seed=2) as silent, Owner("nixl", NBYTES, seed=3) as silent_too:
        first, second = reader.open(silent.description), reader.open(silent_too.description)
        remote = reader.open(owner.description)
        for each in (silent, silent_too):
            each.stop()
        numbers = [first.read(WHOLE), second.read(WHOLE)]
        first.close()
        errors = {done.number: done.error for done in reader.poll()}
        assert errors.keys() == set(numbers)
        assert all("restarted" in str(error) for error in errors.values())
        silent_too.resume()
        for pool in (second, remote):
            assert finish(reader, [number := pool.read(WHOLE)]) == {number: None}


def test_nothing_is_left_behind(owner: Owner, reader: NixlReader) -> None:
    def open_files() -> int:
        return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))

    def use() -> None:
        remote = reader.open(owner.description)
        assert finish(reader, [number := remote.read(WHOLE)]) == {number: None}
        remote.close()

    use()  # connects
    before = open_files()
    for _ in range(20):
        use()
    assert open_files() == before


@pytest.mark.skipif(has_rdma(), reason="UCX needs no TCP here")
def test_no_port_is_open_beyond_loopback(reader: NixlReader) -> None:
    sockets = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    assert ours, "UCX listens on loopback"
    assert all(address.startswith("0100007F:") for address in ours), ours
