"""How a hand-over ends on both sides: deadlines, leases, aborts, and answers to late messages."""

from dataclasses import replace

import pytest

from kv_transfer.protocol.effects import Failed, Freed, Quiesced, RankTransfer, Received
from kv_transfer.protocol.messages import Aborted, Cancel, End, Hold, Open, Pieces, Refused, Release
from kv_transfer.protocol.producer import ENDS, MAX_EARLY_LEASES
from tests.factories.hand_overs import send_all
from tests.factories.transfer import (
    FINGERPRINT,
    HEARTBEAT_S,
    KEY,
    LEASE_S,
    LOAD_TIMEOUT_S,
    Wire,
    make_key,
    sent,
    start,
)


def test_c34_a_load_that_takes_too_long_fails_and_frees_both_ends() -> None:
    wire = Wire()
    start(wire)
    wire.ready(0, 1)
    wire.advance(LOAD_TIMEOUT_S)
    assert wire.notifications == [
        Failed(
            RankTransfer("r"), 16, f"the prompt's KV cache did not arrive within {LOAD_TIMEOUT_S:g} s", False
        )
    ]
    wire.finish_send()
    assert wire.notifications[1:] == [Freed(RankTransfer("r"))]
    wire.assert_at_rest()


def test_c35_a_failure_reports_how_many_blocks_were_verified_in_order() -> None:
    wire = Wire(
        lambda frame: [] if isinstance(frame.message, Pieces) and 1 in frame.message.indices else [frame]
    )
    start(wire, num_blocks=4)
    wire.ready(0, 4)
    wire.deliver()
    wire.advance(LOAD_TIMEOUT_S)
    assert isinstance(wire.notifications[0], Failed)
    assert (
        wire.notifications[0].num_valid_tokens == 16
    )  # block 0; blocks 2 and 3 came without their predecessor


def test_c37_a_finished_prefill_keeps_its_blocks_until_the_lease_ends() -> None:
    wire = Wire()
    wire.begin_send(KEY, 16)
    wire.ready(0, 1)
    wire.finish_send()
    wire.advance(LEASE_S - 0.1)
    assert wire.notifications == []
    wire.advance(0.2)
    assert wire.notifications == [Freed(RankTransfer("r"))]
    assert wire.producer_counters["kv_lease_expiries"] == 1
    wire.assert_at_rest()


def test_c38_signs_of_life_lengthen_a_lease_and_the_consumer_learns_at_once_that_it_is_over() -> None:
    wire = Wire()
    wire.begin_send(KEY, 16)
    wire.begin_load(KEY, 16)  # waits for room, and says so again and again
    wire.ready(0, 1)
    wire.finish_send()
    wire.advance(5 * LEASE_S)
    assert wire.notifications == []
    wire.tamper = lambda frame: [] if frame.source == "consumer" else [frame]
    wire.advance(LEASE_S)
    assert wire.notifications == [Freed(RankTransfer("r"))]
    assert sent(wire, Aborted) == [Aborted(KEY, f"the decode worker was silent for {LEASE_S:g} s", False)]


def test_c39_a_consumer_that_came_early_learns_that_the_prompt_is_aborted_and_does_not_answer() -> None:
    wire = Wire()
    wire.begin_load(KEY, 16)
    wire.deliver()
    wire.begin_send(KEY, 16)
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "it failed", is_unneeded=False))
    wire.deliver()
    assert sent(wire, Aborted) == [Aborted(KEY, "it failed", False)]
    assert sent(wire, Cancel) == []


def test_a_producer_is_known_as_long_as_any_rank_transfer_comes_from_it() -> None:
    """The producer's pool stays open that long."""
    wire = Wire()
    for name in ("one", "other"):
        wire.begin_load(make_key(name), 16, name)
    for name, is_known in (("one", True), ("other", False)):
        wire.at_consumer(wire.consumer.abort(RankTransfer(name), "its client left"))
        assert wire.consumer.knows(KEY.producer) is is_known


def test_c38_one_long_lease_does_not_delay_another() -> None:
    wire = Wire()
    for name in ("long", "short"):
        wire.begin_send(make_key(name), 16, name)
        wire.ready(0, 1, name)
        wire.finish_send(name)
    for _ in range(4):
        wire.advance(LEASE_S / 2)
        wire.at_producer(wire.producer.on_message(b"d", Hold(make_key("long")), wire.clock.now()))
    assert wire.notifications == [Freed(RankTransfer("short"))]


@pytest.mark.parametrize("moment", ["queued", "loading", "complete"])
def test_c39_an_abort_on_the_decode_side_releases_the_producers_blocks_by_message(moment: str) -> None:
    wire = Wire(lambda frame: [] if isinstance(frame.message, End) else [frame])
    wire.begin_send(KEY, 32)
    wire.begin_load(KEY, 32)
    wire.ready(0, 2)
    wire.finish_send()
    if moment != "queued":
        wire.load(0, 2)
    if moment == "complete":
        wire.deliver()
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.deliver()
    quiesced = [Quiesced(RankTransfer("r"))] if moment != "queued" else []
    assert wire.notifications == [*quiesced, Freed(RankTransfer("r"))]
    assert wire.unwanted == [], "the prompt is complete"
    wire.assert_at_rest()


def test_c39_a_cancel_that_overtakes_the_request_still_releases_it() -> None:
    wire = Wire()
    wire.begin_load(KEY, 16)
    wire.in_flight.clear()  # the Hold is lost, the Cancel is not
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.deliver()
    wire.begin_send(KEY, 16)
    wire.ready(0, 1)
    wire.finish_send()
    assert wire.unwanted == [RankTransfer("r")]
    assert wire.notifications == [Freed(RankTransfer("r"))]
    wire.assert_at_rest()


@pytest.mark.parametrize("consumer", ["loads", "waits", "comes later"])
def test_c40_a_request_that_ended_with_its_prefill_is_not_handed_over(consumer: str) -> None:
    wire = Wire()
    wire.begin_send(KEY, 16)
    if consumer != "comes later":
        wire.begin_load(KEY, 16)
    if consumer == "loads":
        wire.load(0, 1)
    wire.deliver()
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "the request ended", True))
    wire.deliver()
    if consumer == "comes later":
        wire.begin_load(KEY, 16)
    if consumer != "loads":
        wire.load(0, 1)
    wire.deliver()
    assert [notification for notification in wire.notifications if isinstance(notification, Failed)] == [
        Failed(RankTransfer("r"), 0, "the request ended", True)
    ]
    wire.deliver()
    wire.assert_at_rest()


def test_c34_a_consumer_whose_producer_never_took_the_request_learns_it_in_the_end() -> None:
    wire = Wire()
    wire.begin_load(KEY, 16)
    wire.advance(MAX_EARLY_LEASES * LEASE_S + HEARTBEAT_S)
    wire.load(0, 1)
    assert isinstance(wire.notifications[0], Failed)
    assert "never received" in wire.notifications[0].reason
    wire.assert_at_rest()


def test_c38_a_consumer_that_beats_waits_for_a_producer_in_a_long_step() -> None:
    """The step lasts longer than a lease, and only then does the engine learn of the request."""
    wire = Wire()
    wire.begin_load(KEY, 48)
    wire.load(0, 3)
    wire.advance(2.5 * LEASE_S)
    wire.begin_send(KEY, 48)
    send_all(wire, 3)
    assert [type(notification) for notification in wire.notifications] == [Received, Freed]
    wire.assert_at_rest()


def test_an_early_consumer_that_connects_again_gets_its_prompt_on_the_new_connection() -> None:
    wire = Wire()
    wire.begin_load(KEY, 48)
    wire.deliver()
    wire.load(0, 3)
    ((_, frame),) = wire.in_flight
    wire.in_flight.clear()
    assert isinstance(frame.message, Open)
    wire.at_producer(wire.producer.on_message(b"again", frame.message, wire.clock.now()))
    wire.begin_send(KEY, 48)
    wire.ready(0, 3)
    assert {target for target, _ in wire.in_flight} == {str(b"again")}
    assert Pieces in [type(frame.message) for _, frame in wire.in_flight]
    wire.finish_send()
    wire.deliver()
    wire.assert_at_rest()


def test_c38_a_consumer_that_died_early_is_forgotten_within_a_lease() -> None:
    wire = Wire()
    wire.begin_load(KEY, 48)
    wire.advance(2 * LEASE_S)
    wire.tamper = lambda frame: [] if frame.source == "consumer" else [frame]
    wire.advance(LEASE_S)
    assert len(wire.producer) == 0


def test_c39_a_prompt_whose_consumer_was_refused_is_unwanted_when_it_begins() -> None:
    wire = Wire()
    wire.begin_load(KEY, 48)
    wire.advance(MAX_EARLY_LEASES * LEASE_S)
    wire.begin_send(KEY, 48)
    assert wire.unwanted == [RankTransfer("r")]
    wire.ready(0, 3)
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "unwanted", True))
    [freed] = wire.notifications
    assert isinstance(freed, Freed)
    assert freed.is_needed, "the hand-over has failed, though our engine ends the request as unwanted"
    assert "never received" in freed.reason
    assert len(wire.producer) == 0
    wire.producer.check_integrity()


@pytest.mark.parametrize("moment", ["prefilling", "unwanted", "complete"])
def test_c39_a_refusal_that_was_lost_is_repeated(moment: str) -> None:
    wire = Wire(
        lambda frame: [] if isinstance(frame.message, Refused) else [frame],
        consumer_fingerprint=replace(FINGERPRINT, dtype="float16"),
    )
    wire.begin_send(KEY, 16)
    wire.begin_load(KEY, 16)
    if moment == "complete":
        send_all(wire, 1)
    wire.load(0, 1)
    wire.deliver()
    if moment == "unwanted":
        wire.at_producer(wire.producer.abort(RankTransfer("r"), "unwanted", True))
    wire.tamper = lambda frame: [frame]
    wire.advance(HEARTBEAT_S)
    reason = "the prefill worker refused: the workers do not match: dtype: float32 != float16"
    [failed] = [notification for notification in wire.notifications if isinstance(notification, Failed)]
    assert failed == Failed(RankTransfer("r"), 0, reason, False)
    assert failed.is_link_failure
    if moment == "prefilling":
        wire.at_producer(wire.producer.abort(RankTransfer("r"), "unwanted", True))
    [freed] = [notification for notification in wire.notifications if isinstance(notification, Freed)]
    assert freed.is_needed
    assert num_ends(wire) == {"kv_sends_refused": 1}
    wire.assert_at_rest()


def test_c39_a_cancel_in_mid_prefill_is_news_for_the_producers_engine() -> None:
    wire = Wire()
    start(wire, num_blocks=3)
    wire.ready(0, 1)
    wire.deliver()
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.deliver()
    assert wire.unwanted == [RankTransfer("r")]
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "unwanted", True))
    assert wire.notifications == [Quiesced(RankTransfer("r")), Freed(RankTransfer("r"))]
    wire.assert_at_rest()


def test_c38_a_consumer_that_is_alive_after_all_is_notified_of_the_expired_lease() -> None:
    wire = Wire()
    wire.begin_send(KEY, 16)
    wire.begin_load(KEY, 16)
    send_all(wire, 1)
    wire.tamper = lambda frame: [] if frame.source == "consumer" else [frame]
    wire.advance(LEASE_S + HEARTBEAT_S)
    wire.load(0, 1)
    assert [type(notification) for notification in wire.notifications] == [Freed, Failed]


def test_a_second_claim_to_a_transfer_fails_alone() -> None:
    wire = Wire()
    start(wire)
    wire.begin_send(KEY, 48, "second")
    wire.begin_load(KEY, 48, "second")
    wire.ready(0, 1, "second")
    wire.load(0, 3, "second")
    wire.finish_send("second")
    send_all(wire, 3)
    assert {
        type(notification)
        for notification in wire.notifications
        if notification.rank_transfer.request_id == "second"
    } == {Failed, Freed}
    assert {
        type(notification)
        for notification in wire.notifications
        if notification.rank_transfer.request_id == "r"
    } == {Received, Freed}
    wire.assert_at_rest()


def num_ends(wire: Wire) -> dict[str, int]:
    """Every end that the producer counted."""
    wire.producer.check_integrity()
    return {end: wire.producer_counters[end] for end in ENDS if wire.producer_counters[end]}


def test_a_hand_over_that_both_ends_gave_up_counts_once() -> None:
    wire = Wire()
    start(wire)
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.deliver()
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "the client left", True))
    assert num_ends(wire) == {"kv_sends_cancelled": 1}


def test_a_load_that_failed_during_the_prefill_is_a_failed_hand_over_of_the_producer_too() -> None:
    """The producer's engine then ends the request, because it is unwanted."""
    wire = Wire()
    start(wire)
    wire.advance(LOAD_TIMEOUT_S)
    assert wire.unwanted == [RankTransfer("r")]
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "unwanted", True))
    freed = wire.notifications[-1]
    assert isinstance(freed, Freed)
    assert freed.is_needed
    assert "did not arrive" in freed.reason
    assert num_ends(wire) == {"kv_sends_cancelled": 1}


def test_a_hand_over_that_was_cancelled_before_it_began_counts_once() -> None:
    wire = Wire()
    for _ in range(2):
        wire.at_producer(wire.producer.on_message(b"consumer", Cancel(KEY, "the client left"), 0.0))
    assert num_ends(wire) == {}
    wire.begin_send(KEY, 16)
    wire.finish_send()
    assert num_ends(wire) == {"kv_sends_cancelled": 1}


def test_late_messages_of_a_hand_over_that_is_done_end_no_other() -> None:
    """A Hold that was overtaken does not announce the rank transfer again, and a repeated Release finds nothing."""
    wire = Wire()
    start(wire, num_blocks=1)
    send_all(wire, 1)
    num_sent = len(wire.sent)
    for message in (Hold(KEY), Release(KEY), Cancel(KEY, "late")):
        wire.at_producer(wire.producer.on_message(b"consumer", message, 0.0))
    assert wire.producer_counters["kv_late_messages"] == 3
    assert len(wire.sent) == num_sent
    wire.assert_at_rest()
    assert num_ends(wire) == {"kv_sends_done": 1}


def test_a_hand_over_that_the_consumer_ended_long_before_it_began_is_not_needed() -> None:
    wire = Wire()
    wire.at_producer(wire.producer.on_message(b"consumer", Cancel(KEY, "the client left", True), 0.0))
    wire.advance(2 * LEASE_S)
    assert len(wire.producer) == 0
    wire.begin_send(KEY, 16)
    assert wire.unwanted == [RankTransfer("r")]
    wire.finish_send()
    [freed] = wire.notifications
    assert isinstance(freed, Freed)
    assert not freed.is_needed
    assert freed.reason == "the decode worker had ended the hand-over before"
