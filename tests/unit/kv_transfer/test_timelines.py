"""The record that each end reports when a hand-over has ended: real hand-overs on virtual time."""

import pytest

from baton.kv import TransferRole
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    LoadBlocks,
    SendBlocks,
)
from kv_transfer.records import combine
from tests.factories.endpoints import LEASE_S, LOAD_TIMEOUT_S, TOKEN, Fabric, Worker
from tests.factories.hand_overs import both_ends

ATTEMPT = 3


def begin(fabric: Fabric, prefill: Worker, decode: Worker) -> None:
    """Both ends know of a prompt of 32 tokens; the decode worker has room a second later."""
    to_producer, to_consumer = both_ends(prefill.ref, decode.ref, attempt=ATTEMPT)
    prefill.command(BeginSend("r", to_producer, 32))
    decode.command(BeginLoad("r", to_consumer, 32))
    fabric.deliver()
    fabric.clock.advance(1.0)
    decode.load(LoadBlocks("r", 0, decode.blocks_for(32)))
    fabric.deliver()


def hand_over(fabric: Fabric, prefill: Worker) -> None:
    """Hands over half of the prompt after a quarter of a second, and the rest after another quarter. The rest takes an
    eighth of a second to arrive."""
    prefill.compute(32)
    block_ids = prefill.blocks_for(32)
    fabric.clock.advance(0.25)
    prefill.save(SendBlocks("r", 0, block_ids[: len(block_ids) // 2]))
    fabric.deliver()
    fabric.clock.advance(0.25)
    prefill.save(SendBlocks("r", len(block_ids) // 2, block_ids[len(block_ids) // 2 :]))
    prefill.command(FinishSend("r", len(block_ids), (), TOKEN))
    fabric.clock.advance(0.125)
    fabric.deliver()


def record_of(worker: Worker) -> TransferRecord:
    """The one record in its output."""
    (record,) = worker.output().transfers.values()
    return record


def events(record: TransferRecord) -> dict[str, float]:
    times = [event.at_s for event in record.events]
    assert times == sorted(times)
    return {event.kind.value: event.at_s for event in record.events}


@pytest.mark.parametrize("transport", ["zmq_tcp", "shared_memory"])
@pytest.mark.parametrize(("num_producing", "num_consuming"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_both_ends_of_a_hand_over_tell_when_what_happened(
    transport: str, num_producing: int, num_consuming: int
) -> None:
    fabric = Fabric(transport)
    prefill, decode = fabric.add("p0", num_producing), fabric.add("d0", num_consuming)
    begin(fabric, prefill, decode)
    hand_over(fabric, prefill)
    given, taken = record_of(prefill), record_of(decode)
    num_bytes = 2 * sum(blocks[0].nbytes for blocks in prefill.blocks)
    for record, role, peer in ((given, TransferRole.PRODUCER, "d0"), (taken, TransferRole.CONSUMER, "p0")):
        assert (record.role, record.peer, record.attempt) == (role, peer, ATTEMPT)
        assert (record.transport, record.num_bytes, record.reason) == (transport, num_bytes, "")
    assert events(given) == {"begun": 0.0, "first_piece": 1.25, "prefilled": 1.5, "released": 1.625}
    assert events(taken) == {"begun": 0.0, "asked": 1.0, "first_piece": 1.25, "verified": 1.625}
    assert given.exposed_s == 0.125
    assert (taken.elapsed_s, taken.moving_s) == (0.625, 0.375)
    assert not prefill.output()
    fabric.assert_at_rest()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c34_a_load_that_failed_says_when_and_why(num_ranks: int) -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0", num_ranks)
    begin(fabric, prefill, decode)
    fabric.advance(LOAD_TIMEOUT_S)
    reason = f"the prompt's KV cache did not arrive within {LOAD_TIMEOUT_S:g} s"
    taken = record_of(decode)
    assert events(taken) == {"begun": 0.0, "asked": 1.0, "failed": 1.0 + LOAD_TIMEOUT_S}
    assert (taken.reason, taken.num_bytes, taken.elapsed_s) == (reason, 0, LOAD_TIMEOUT_S)
    assert not taken.is_link_failure, "its prefill worker answered all the time"
    prefill.command(FinishSend("r", 2, (1, 2), TOKEN))
    given = record_of(prefill)
    assert (given.events[-1].kind, given.reason, given.exposed_s) == (TransferEventKind.FAILED, reason, 0.0)


@pytest.mark.parametrize(("num_producing", "num_consuming"), [(1, 1), (1, 2), (2, 1)])
def test_c42_a_load_without_any_answer_counts_against_the_link(
    num_producing: int, num_consuming: int
) -> None:
    """One rank that hears nothing is enough: the others only give up with it."""
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0", num_producing), fabric.add("d0", num_consuming)
    begin(fabric, prefill, decode)
    fabric.network.cut("sim://p0/0")
    fabric.advance(2 * LEASE_S)
    taken = record_of(decode)
    assert taken.events[-1].kind is TransferEventKind.FAILED
    assert (taken.is_link_failure, "was silent" in taken.reason) == (True, True)


def test_a_prefill_that_its_worker_gave_up_is_not_the_links_fault() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode)
    prefill.command(AbortSend("r", "it drains", is_unneeded=False, is_held=True))
    fabric.deliver()
    taken = record_of(decode)
    assert (taken.events[-1].kind, taken.is_link_failure) == (TransferEventKind.FAILED, False)


def test_c38_a_lease_that_ended_says_so() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode)
    fabric.network.cut("sim://p0/0")
    hand_over(fabric, prefill)
    fabric.advance(LEASE_S)
    given = record_of(prefill)
    assert (given.events[-1].kind, given.at(TransferEventKind.PREFILLED)) == (TransferEventKind.FAILED, 1.5)
    assert given.reason == f"the decode worker was silent for {LEASE_S:g} s"


def test_c40_a_prompt_that_the_prefill_worker_answered_alone_was_not_needed() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode)
    prefill.command(AbortSend("r", "token 0 was the last", is_unneeded=True, is_held=True))
    fabric.deliver()
    for worker in (prefill, decode):
        record = record_of(worker)
        assert (record.events[-1].kind, record.reason) == (
            TransferEventKind.NOT_NEEDED,
            "token 0 was the last",
        )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_aborted_hand_over_has_no_record(num_ranks: int) -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0", num_ranks), fabric.add("d0", num_ranks)
    begin(fabric, prefill, decode)
    decode.command(AbortLoad("r", "the client left"))
    prefill.command(AbortSend("r", "the client left", is_unneeded=True, is_held=False))
    fabric.deliver()
    assert not prefill.output().transfers
    assert not decode.output().transfers
    fabric.assert_at_rest()
    for connector in fabric.connectors:
        connector.endpoint.check_integrity()


def test_workers_that_do_not_match_say_so_in_their_records() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0", block_size=16), fabric.add("d0", block_size=24)
    begin(fabric, prefill, decode)
    prefill.command(FinishSend("r", 2, (1, 2), TOKEN))
    are_link_failures = []
    for worker in (prefill, decode):
        record = record_of(worker)
        are_link_failures.append(record.is_link_failure)
        assert record.events[-1].kind is TransferEventKind.FAILED
        assert "block" in record.reason
    assert are_link_failures == [False, True], "the consumer reports it, once"


def test_the_record_of_all_ranks_begins_with_the_first_and_ends_with_the_last_and_the_worst() -> None:
    def record(prefilled_s: float, end: TransferEventKind, end_s: float) -> TransferRecord:
        kinds = (TransferEventKind.FIRST_PIECE, TransferEventKind.PREFILLED, end)
        times = (prefilled_s - 1.0, prefilled_s, end_s)
        return TransferRecord(
            role=TransferRole.PRODUCER,
            peer="d0",
            attempt=0,
            num_bytes=10,
            events=tuple(map(TransferEvent, kinds, times)),
            reason=end.value,
        )

    failed = record(2.0, TransferEventKind.FAILED, 3.0)
    released = record(2.5, TransferEventKind.RELEASED, 4.0)
    whole = combine([released, failed])
    assert events(whole) == {"first_piece": 1.0, "prefilled": 2.5, "failed": 4.0}
    assert (whole.num_bytes, whole.reason) == (20, "failed")
    assert combine([released]) == released
