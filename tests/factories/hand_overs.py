"""The commands of one hand-over, for both of its workers."""

from baton.kv import KVTransferParams, OnLoadFailure, TransferRole, WorkerRef
from kv_transfer.commands import BeginLoad, BeginSend, FinishSend, LoadBlocks, SendBlocks
from tests.factories.endpoints import TOKEN, Fabric, Worker
from tests.factories.transfer import Wire


def both_ends(
    producer: WorkerRef,
    consumer: WorkerRef,
    transfer_id: str = "t",
    on_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE,
    attempt: int = 0,
) -> tuple[KVTransferParams, KVTransferParams]:
    """The parameters of the hand-over for its producer, and for its consumer."""
    return (
        KVTransferParams(TransferRole.PRODUCER, transfer_id, attempt, consumer, on_failure),
        KVTransferParams(TransferRole.CONSUMER, transfer_id, attempt, producer, on_failure),
    )


def begin(
    fabric: Fabric,
    prefill: Worker,
    decode: Worker,
    num_tokens: int,
    request_id: str = "r",
    block_ids: tuple[int, ...] | None = None,
) -> None:
    """Announces a prompt to both ends, reserves the consumer's blocks (by default 1, 2, ...), and delivers."""
    to_producer, to_consumer = both_ends(prefill.ref, decode.ref, request_id)
    prefill.command(BeginSend(request_id, to_producer, num_tokens))
    decode.command(BeginLoad(request_id, to_consumer, num_tokens))
    decode.load(LoadBlocks(request_id, 0, block_ids or decode.blocks_for(num_tokens)))
    fabric.deliver()


def begun(
    transport: str, num_tokens: int, num_producers: int = 1, num_consumers: int = 1
) -> tuple[Fabric, Worker, Worker]:
    """Two workers with these numbers of ranks. One has a prompt's KV in its blocks; both know of the hand-over `r`."""
    fabric = Fabric(transport)
    prefill, decode = fabric.add("p0", num_producers), fabric.add("d0", num_consumers)
    prefill.compute(num_tokens)
    begin(fabric, prefill, decode, num_tokens)
    return fabric, prefill, decode


def prefill_at_once(prefill: Worker, num_tokens: int, request_id: str = "r") -> None:
    """Computes a prompt of full blocks in one step. Does not deliver anything."""
    prefill.compute(num_tokens)
    block_ids = prefill.blocks_for(num_tokens)
    prefill.save(SendBlocks(request_id, 0, block_ids))
    prefill.command(FinishSend(request_id, len(block_ids), (), TOKEN))


def finish(fabric: Fabric, prefill: Worker, num_tokens: int, request_id: str = "r") -> None:
    """Completes the prompt block by block. Its last block may be partly filled."""
    block_ids = prefill.blocks_for(num_tokens)
    num_full = num_tokens // prefill.ref.block_size
    for index in range(num_full):
        prefill.save(SendBlocks(request_id, index, (block_ids[index],)))
        fabric.deliver()
    prefill.command(FinishSend(request_id, len(block_ids), block_ids[num_full:], TOKEN))
    fabric.advance(0.01)  # enough for the reads of a device, which are polled


def send_all(wire: Wire, num_blocks: int) -> None:
    """Computes the blocks of a prompt, ends the prefill, and delivers, between two state machines."""
    wire.ready(0, num_blocks)
    wire.finish_send()
    wire.deliver()
