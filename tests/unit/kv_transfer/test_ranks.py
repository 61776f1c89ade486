"""Behaviour 47: a hand-over of several rank transfers is over when all of them are, and failed when one is."""

from unittest.mock import create_autospec

import pytest

from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV
from baton.transfer import TransferEventKind
from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    KVConnectorMetadata,
    LoadBlocks,
    NoteStarvation,
    SendBlocks,
)
from kv_transfer.connector.ranks import BlockMover, RankedConnector
from kv_transfer.parts import GiveUp, Loads, Sends
from kv_transfer.protocol.messages import TO_CONSUMER, Pieces
from tests.factories.endpoints import (
    CELL_BYTES,
    CONFIG,
    LATENTS,
    LEASE_S,
    LOAD_TIMEOUT_S,
    NUM_LAYERS,
    TOKEN,
    Fabric,
)
from tests.factories.hand_overs import begin, begun, both_ends, finish

NUM_TOKENS = 80
RANKS = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)]
BLOCK_SIZES = [(16, 16), (16, 32), (32, 16)]
TRANSPORTS = [("shared_memory", False), ("zmq_tcp", False), ("cuda_ipc", True), ("zmq_tcp", True)]


@pytest.mark.parametrize(("transport", "on_device"), TRANSPORTS)
@pytest.mark.parametrize(("num_producers", "num_consumers"), RANKS)
@pytest.mark.parametrize(("producer_block", "consumer_block"), BLOCK_SIZES)
def test_c47_a_prompt_arrives_whole_whatever_the_ranks_and_blocks(
    transport: str,
    on_device: bool,
    num_producers: int,
    num_consumers: int,
    producer_block: int,
    consumer_block: int,
) -> None:
    fabric = Fabric(transport, on_device=on_device)
    prefill = fabric.add("p0", num_producers, producer_block)
    decode = fabric.add("d0", num_consumers, consumer_block)
    prefill.compute(NUM_TOKENS)
    begin(fabric, prefill, decode, NUM_TOKENS)
    assert decode.output() == KVConnectorOutput()
    finish(fabric, prefill, NUM_TOKENS)
    (received,) = decode.output().finished_recving
    assert (received.request_id, received.first_token) == ("r", TOKEN)
    assert decode.holds(NUM_TOKENS)
    assert prefill.output().finished_sending == ("r",)
    fabric.assert_at_rest()


@pytest.mark.parametrize(("transport", "on_device"), TRANSPORTS)
@pytest.mark.parametrize(("num_producers", "num_consumers"), RANKS)
def test_c47_latents_arrive_once_on_every_rank(
    transport: str, on_device: bool, num_producers: int, num_consumers: int
) -> None:
    """If the producer has more ranks, some send nothing. Their blocks become free like those of the others."""
    fabric = Fabric(transport, on_device=on_device)
    prefill = fabric.add("p0", num_producers, fingerprint=LATENTS)
    decode = fabric.add("d0", num_consumers, 32, fingerprint=LATENTS)
    prefill.compute(NUM_TOKENS)
    begin(fabric, prefill, decode, NUM_TOKENS)
    finish(fabric, prefill, NUM_TOKENS)
    output = decode.output()
    (received,) = output.finished_recving
    assert decode.holds(NUM_TOKENS)
    assert received.num_bytes == num_consumers * NUM_LAYERS * NUM_TOKENS * CELL_BYTES
    sent = prefill.output()
    assert sent.finished_sending == ("r",)
    record = sent.transfers["r"]
    assert (record.events[-1].kind, record.transport) == (TransferEventKind.RELEASED, transport)
    fabric.assert_at_rest()


@pytest.mark.parametrize("ends_at", ["decode", "prefill"])
def test_c47_a_rank_that_sends_nothing_ends_with_the_others(ends_at: str) -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0", 4, fingerprint=LATENTS), fabric.add("d0", 2, fingerprint=LATENTS)
    prefill.compute(NUM_TOKENS)
    begin(fabric, prefill, decode, NUM_TOKENS)
    prefill.save(SendBlocks("r", 0, prefill.blocks_for(NUM_TOKENS)[:2]))
    fabric.deliver()
    if ends_at == "decode":
        decode.command(AbortLoad("r", "the client left"))
        fabric.deliver()
        assert decode.output().quiesced == ("r",)
        finish(fabric, prefill, NUM_TOKENS)
    else:
        prefill.command(AbortSend("r", "out of blocks", is_unneeded=False, is_held=True))
        fabric.advance(1.0)
        (failed,) = decode.output().failed_recving
        assert "out of blocks" in failed.reason
    sent = prefill.output()
    assert sent.finished_sending == ("r",)
    kind = sent.transfers["r"].events[-1].kind
    assert kind is (TransferEventKind.NOT_NEEDED if ends_at == "decode" else TransferEventKind.FAILED)
    fabric.assert_at_rest()


def test_c47_while_one_rank_has_not_reported_nothing_has_arrived_and_nothing_is_free() -> None:
    fabric, prefill, decode = begun("zmq_tcp", NUM_TOKENS, 2, 2)
    fabric.network.cut(decode.ref.kv_addresses[1])
    finish(fabric, prefill, NUM_TOKENS)
    assert decode.output() == KVConnectorOutput()
    assert prefill.output() == KVConnectorOutput()
    fabric.network.mend()
    fabric.advance(1.0)
    assert [load.request_id for load in decode.output().finished_recving] == ["r"]
    assert prefill.output().finished_sending == ("r",)
    fabric.assert_at_rest()


@pytest.mark.parametrize(("num_producers", "num_consumers"), [(1, 2), (2, 1), (2, 2)])
def test_c47_a_failure_on_one_rank_is_one_failure_and_keeps_what_all_have(
    num_producers: int, num_consumers: int
) -> None:
    fabric, prefill, decode = begun("zmq_tcp", NUM_TOKENS, num_producers, num_consumers)
    block_ids = prefill.blocks_for(NUM_TOKENS)
    prefill.save(SendBlocks("r", 0, block_ids[:2]))
    fabric.deliver()
    fabric.network.cut(decode.ref.kv_addresses[-1])
    prefill.save(SendBlocks("r", 2, block_ids[2:4]))
    fabric.advance(LOAD_TIMEOUT_S)
    (failed,) = decode.output().failed_recving
    assert (failed.request_id, failed.num_valid_blocks) == ("r", 2)
    fabric.network.mend()
    prefill.command(FinishSend("r", 5, block_ids[4:], TOKEN))
    fabric.advance(LEASE_S + 1)
    assert prefill.output().finished_sending == ("r",)
    assert decode.output() == KVConnectorOutput()
    fabric.assert_at_rest()


def test_c47_an_abort_ends_on_every_rank() -> None:
    fabric, prefill, decode = begun("zmq_tcp", NUM_TOKENS, 2, 4)
    decode.command(AbortLoad("r", "the client left"))
    fabric.deliver()
    assert decode.output().quiesced == ("r",)
    finish(fabric, prefill, NUM_TOKENS)
    assert prefill.output().finished_sending == ("r",)
    fabric.assert_at_rest()


def test_c35_ranks_that_have_different_parts_keep_the_least() -> None:
    fabric, prefill, decode = begun("zmq_tcp", NUM_TOKENS, 1, 2)
    second = decode.ref.kv_addresses[1]

    def lose_the_third_piece(address: str, frame: bytes) -> bool:
        if address != second:
            return False
        message = TO_CONSUMER.decode(frame)
        return isinstance(message, Pieces) and 2 in message.indices

    fabric.network.lose = lose_the_third_piece
    for index, block_id in enumerate(prefill.blocks_for(NUM_TOKENS)[:4]):
        prefill.save(SendBlocks("r", index, (block_id,)))
        fabric.deliver()
    fabric.advance(LOAD_TIMEOUT_S)
    (failed,) = decode.output().failed_recving
    assert failed.num_valid_blocks == 2


@pytest.mark.parametrize(("num_ranks", "block_size", "reason"), [(1, 24, "16 and 24"), (16, 16, "8 heads")])
def test_c43_workers_that_cannot_exchange_kv_say_so_and_hold_nothing(
    num_ranks: int, block_size: int, reason: str
) -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    prefill.compute(NUM_TOKENS)
    stranger = WorkerRef("x0", "x-incarnation", tuple(decode.ref.kv_addresses * num_ranks), block_size)
    decode.command(BeginLoad("r", KVTransferParams(TransferRole.CONSUMER, "t", 0, stranger), NUM_TOKENS))
    decode.load(LoadBlocks("r", 0, (1, 2, 3, 4, 5)))
    (failed,) = decode.output().failed_recving
    assert reason in failed.reason
    prefill.command(BeginSend("r", KVTransferParams(TransferRole.PRODUCER, "t", 0, stranger), NUM_TOKENS))
    finish(fabric, prefill, NUM_TOKENS)
    assert prefill.output().finished_sending == ("r",)
    fabric.assert_at_rest()


def test_c34_a_rank_that_is_gone_is_missed_while_the_others_talk_on() -> None:
    """For example, a prefill worker loses a rank: the engine ends, and rank 0's transfer thread goes on."""
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0", 2), fabric.add("d0", 1)
    begin(fabric, prefill, decode, NUM_TOKENS)
    fabric.network.cut("sim://p0/1")
    fabric.advance(2 * CONFIG.peer_timeout_s)
    assert 2 * CONFIG.peer_timeout_s < LOAD_TIMEOUT_S
    (failed,) = decode.output().failed_recving
    assert "silent" in failed.reason


@pytest.mark.parametrize("are_postponed", [(True, False), (False, True), (True, True)])
def test_c31_a_load_is_postponed_only_if_all_ranks_postponed_it(are_postponed: tuple[bool, bool]) -> None:
    loads: Loads[int] = Loads()
    loads.begin(LoadBlocks("r", 0, (1,)), range(2))
    first, second = (FailedKV("r", 1, "why", is_postponed=is_postponed) for is_postponed in are_postponed)
    assert isinstance(loads.failed(0, first), GiveUp)
    assert loads.failed(1, second) == FailedKV("r", 1, "why", is_postponed=all(are_postponed))


@pytest.mark.parametrize("has_begun", [True, False])
def test_c47_a_report_of_a_part_that_reported_before_or_of_an_unknown_load_means_nothing(
    has_begun: bool,
) -> None:
    loads: Loads[int] = Loads()
    arrived, failed = ReceivedKV("r", TOKEN, 1, 0.1, 0.1), FailedKV("r", 1, "why")
    if has_begun:
        loads.begin(LoadBlocks("r", 0, (1,)), range(2))
        assert loads.arrived(0, arrived) is None
    assert loads.arrived(0, arrived) is loads.failed(0, failed) is loads.quiesced("r", 0) is None
    if has_begun:
        assert loads.arrived(1, arrived) == ReceivedKV("r", TOKEN, 2, 0.1, 0.1), "each part counts once"


def test_c47_a_part_of_a_send_is_freed_once() -> None:
    sends: Sends[int] = Sends()
    sends.begin("r", range(2))
    assert [sends.freed("r", part) for part in (0, 0, 1, 1)] == [False, False, True, False]


@pytest.mark.parametrize("num_consumers", [1, 2])
def test_c47_a_load_that_arrived_on_one_rank_waits_for_a_late_rank_that_seems_to_be_stuck(
    num_consumers: int,
) -> None:
    """The second rank of P does not know yet that another prompt has blocks, and that the prompt is complete."""
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0", 2), fabric.add("d0", num_consumers)
    prefill.compute(NUM_TOKENS)
    to_producer, to_consumer = both_ends(prefill.ref, decode.ref, "r")
    other, _ = both_ends(prefill.ref, decode.ref, "other")
    block_ids = prefill.blocks_for(NUM_TOKENS)
    prefill.command(BeginSend("other", other, 16), BeginSend("r", to_producer, NUM_TOKENS))
    prefill.save(SendBlocks("other", 0, (9,)))
    prefill.command(FinishSend("other", 1, (), TOKEN), NoteStarvation(True))
    progress = KVConnectorMetadata((NoteStarvation(False),), (), (SendBlocks("r", 0, block_ids),))
    end = KVConnectorMetadata((FinishSend("r", len(block_ids), (), TOKEN),), (), ())
    decode.command(BeginLoad("r", to_consumer, NUM_TOKENS))
    for rank in prefill.connector._ranks:
        rank.send_commands(progress)
        rank.save_kv_blocks(progress, set())
        rank.send_commands(end)
        if rank is prefill.connector._ranks[0]:
            fabric.network.cut(prefill.ref.kv_addresses[1])
            decode.load(LoadBlocks("r", 0, decode.blocks_for(NUM_TOKENS)))
            fabric.deliver()
            fabric.network.mend()
        fabric.advance(CONFIG.heartbeat_s)
        output = decode.output()
        assert not output.failed_recving
    (received,) = output.finished_recving
    assert (received.request_id, received.first_token) == ("r", TOKEN)
    assert decode.holds(NUM_TOKENS)
    assert prefill.output().finished_sending == ("r",)


def test_c31_what_every_rank_says_of_postponed_and_of_unwanted_prompts_is_passed_on() -> None:
    says = [KVConnectorOutput(can_load=("a",)), KVConnectorOutput(can_load=("b",), unwanted=("c",))]
    ranks = [create_autospec(BlockMover, instance=True) for _ in says]
    for rank, output in zip(ranks, says, strict=True):
        rank.get_finished.return_value = output
    assert RankedConnector(ranks).get_finished() == KVConnectorOutput(can_load=("a", "b"), unwanted=("c",))
