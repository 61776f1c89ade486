"""CUDA IPC between two processes and one device, or two."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from baton.clock import SystemClock
from kv_transfer.transport.base import Runs, TransportError
from kv_transfer.transport.cuda_driver import cuda_is_available
from kv_transfer.transport.cuda_ipc import CudaIpcReader
from kv_transfer.transport.cuda_memory import CudaMemory
from tests.factories.pool_readers import finish, make_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_is_available(), reason="this machine has no CUDA device"),
]

NBYTES = 64 * 2**20
BLOCK = 2**20


def pattern(device: int) -> torch.Tensor:
    return (torch.arange(NBYTES, device=f"cuda:{device}", dtype=torch.int64) * 2654435761 % 251).to(
        torch.uint8
    )


def own(device: int, pipe: Connection) -> None:
    """Owns a pool until its parent is gone."""
    memory = CudaMemory(NBYTES, device)
    torch.as_tensor(memory, device=f"cuda:{device}").copy_(pattern(device))
    torch.cuda.synchronize(device)
    pipe.send(CudaIpcReader(memory).describe())
    pipe.recv()


@pytest.fixture(params=[0, -1], ids=["same device", "last device"])
def owner(request: pytest.FixtureRequest) -> Iterator[tuple[multiprocessing.process.BaseProcess, bytes]]:
    device = request.param % torch.cuda.device_count()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=own, args=(device, theirs), daemon=True)
    process.start()
    assert ours.poll(120), "the owner of the pool does not answer"
    yield process, ours.recv()
    process.kill()
    process.join()


def read(reader: CudaIpcReader, description: bytes, runs: Runs) -> str | None:
    pool = reader.open(description)
    number = pool.read(runs)
    error = finish(reader, [number])[number]
    pool.close()
    return error


def test_the_right_bytes_arrive_and_no_others_change(
    owner: tuple[multiprocessing.process.BaseProcess, bytes],
) -> None:
    memory = CudaMemory(NBYTES, 0)
    pool = torch.as_tensor(memory, device="cuda:0")
    reader = CudaIpcReader(memory)
    blocks = [(3, 7), (4, 8), (60, 0), (9, 33)]
    error = read(reader, owner[1], make_runs(*((a * BLOCK, b * BLOCK, BLOCK) for a, b in blocks)))
    assert error is None
    expected = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
    for source, target in blocks:
        expected[target * BLOCK : (target + 1) * BLOCK] = pattern(0)[source * BLOCK : (source + 1) * BLOCK]
    torch.testing.assert_close(pool, expected, rtol=0, atol=0)
    reader.close()
    del pool
    memory.free()


def test_an_owner_that_was_killed_cannot_be_opened_and_harms_nothing(
    owner: tuple[multiprocessing.process.BaseProcess, bytes],
) -> None:
    process, description = owner
    process.kill()
    process.join()
    memory = CudaMemory(NBYTES, 0)
    reader = CudaIpcReader(memory)
    with pytest.raises(TransportError):
        reader.open(description)
    torch.zeros(8, device="cuda:0").sum().item()
    reader.close()
    memory.free()


def test_reads_queued_one_after_the_other_all_end_and_say_how_fast(
    owner: tuple[multiprocessing.process.BaseProcess, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Says how fast; a figure, not a verdict."""
    memory = CudaMemory(NBYTES, 0)
    reader = CudaIpcReader(memory)
    pool, clock = reader.open(owner[1]), SystemClock()
    finish(reader, [pool.read(make_runs((0, 0, NBYTES)))])
    began = clock.now()
    errors = finish(reader, [pool.read(make_runs((0, 0, NBYTES))) for _ in range(20)])
    assert set(errors.values()) == {None}
    with capsys.disabled():
        print(f" {20 * NBYTES / (clock.now() - began) / 1e9:.0f} GB/s", end="")
    pool.close()
    reader.close()
    memory.free()
