"""Behaviour 43: workers that do not fit together, or have another protocol version, say which field it is, at once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from baton.errors import WireError
from baton.kv import PROTOCOL_VERSION
from kv_transfer.commands import BeginLoad, FinishSend, LoadBlocks
from kv_transfer.protocol.messages import (
    PREFIX_BYTES,
    SEAL_BYTES,
    TO_CONSUMER,
    TO_PRODUCER,
    DamagedFrame,
    Hold,
    OtherVersion,
    SealedCodec,
    TransferKey,
    Unreadable,
    seal,
)
from tests.factories.endpoints import FINGERPRINT, TOKEN, Fabric, Worker
from tests.factories.hand_overs import begin, both_ends

NUM_TOKENS = 64
KEY = TransferKey("t", 0, "p0-incarnation", "d0-incarnation")
Alter = Callable[[str, bytes], bytes]


def counters(*workers: Worker) -> dict[str, int]:
    return {name: sum(w.connector.counters().get(name, 0) for w in workers) for name in COUNTED}


COUNTED = ("kv_bytes_sent", "kv_bytes_received", "kv_bad_messages", "kv_version_mismatches")


def of_version(version: int, header: bytes) -> bytes:
    return seal(header[PREFIX_BYTES:], version)


def with_changed(kind: str, change: Callable[[list[Any]], None]) -> Alter:
    """Changes the fields of every message of one kind; a seal that fits goes with them."""

    def alter(_: str, header: bytes) -> bytes:
        parts = msgpack.unpackb(header[PREFIX_BYTES:], strict_map_key=False)
        if parts[0] != kind:
            return header
        change(parts)
        return seal(msgpack.packb(parts), PROTOCOL_VERSION)

    return alter


@pytest.mark.parametrize("transport", ["zmq_tcp", "shared_memory"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "another"), ("dtype", "int8"), ("layout", "HTKLD"), ("protocol_version", 9)],
)
def test_c43_unlike_workers_refuse_before_a_byte_moves_and_name_the_field(
    transport: str, field: str, value: Any
) -> None:
    fabric = Fabric(transport)
    prefill = fabric.add("p0")
    decode = fabric.add("d0", fingerprint=replace(FINGERPRINT, **{field: value}))
    prefill.compute(NUM_TOKENS)
    begin(fabric, prefill, decode, NUM_TOKENS)
    output = decode.output()
    (failed,), (record,) = output.failed_recving, output.transfers.values()
    assert f"{field}: {getattr(FINGERPRINT, field)} != {value}" in failed.reason
    assert record.is_link_failure, "no request should try this pair again soon"
    prefill.command(FinishSend("r", 4, prefill.blocks_for(NUM_TOKENS), TOKEN))
    fabric.deliver()
    assert prefill.output().finished_sending == ("r",)
    assert counters(prefill, decode)["kv_bytes_sent"] == counters(prefill, decode)["kv_bytes_received"] == 0
    assert fabric.clock.now() == 0.0
    fabric.assert_at_rest()


def test_c43_workers_of_two_versions_say_so_on_the_first_message() -> None:
    """The consumer is one version ahead, and so can read nothing that the producer says either."""
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    (consumer,) = decode.ref.kv_addresses
    fabric.network.alter = lambda source, header: of_version(
        PROTOCOL_VERSION + (1 if source == consumer else -1), header
    )
    begin(fabric, prefill, decode, NUM_TOKENS)
    output = decode.output()
    (failed,), (record,) = output.failed_recving, output.transfers.values()
    assert record.is_link_failure
    assert failed.reason.endswith(
        f"protocol mismatch with the prefill worker: version {PROTOCOL_VERSION - 1} of the KV plane, ours is "
        f"{PROTOCOL_VERSION}; run the same version of Baton on both"
    )
    assert fabric.clock.now() == 0.0
    for worker in (prefill, decode):
        assert counters(worker)["kv_version_mismatches"] == counters(worker)["kv_bad_messages"] > 0


def test_c43_a_producer_names_both_versions() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    (consumer,) = decode.ref.kv_addresses
    fabric.network.alter = lambda source, header: of_version(9, header) if source == consumer else header
    begin(fabric, prefill, decode, NUM_TOKENS)
    (failed,) = decode.output().failed_recving
    assert f"version 9 of the KV plane, ours is {PROTOCOL_VERSION}; run the same version" in failed.reason


def test_an_unintelligible_message_fails_its_load_at_once() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    fabric.network.alter = with_changed("Open", lambda parts: parts.append(0))
    begin(fabric, prefill, decode, NUM_TOKENS)
    (failed,) = decode.output().failed_recving
    assert "protocol mismatch with the prefill worker: Open: expected 10 fields" in failed.reason
    assert counters(decode)["kv_version_mismatches"] == 0


def test_only_loads_from_that_producer_fail() -> None:
    fabric = Fabric("zmq_tcp")
    stranger, prefill, decode = fabric.add("p1"), fabric.add("p0"), fabric.add("d0")
    (address,) = stranger.ref.kv_addresses
    decode.command(BeginLoad("s", both_ends(stranger.ref, decode.ref, "s")[1], NUM_TOKENS))
    fabric.network.alter = lambda source, header: of_version(9, header) if source == address else header
    begin(fabric, prefill, decode, NUM_TOKENS)
    assert decode.output().failed_recving == ()
    decode.load(LoadBlocks("s", 0, decode.blocks_for(NUM_TOKENS)))
    fabric.deliver()
    assert [failed.request_id for failed in decode.output().failed_recving] == ["s"]


def test_a_damaged_message_is_repeated_and_fails_nothing() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    fabric.network.alter = lambda _, header: header[:-1] + bytes([header[-1] ^ 1])
    begin(fabric, prefill, decode, NUM_TOKENS)
    fabric.network.alter = lambda _, header: header
    fabric.advance(0.6)  # a heartbeat
    assert decode.output().failed_recving == ()
    assert counters(prefill)["kv_bad_messages"] > 0
    assert prefill.connector.counters()["kv_sends_started"] == 1


@pytest.mark.parametrize(
    ("frame", "kind", "complaint"),
    [
        (b"", DamagedFrame, "a frame of 0 bytes is damaged"),
        (TO_PRODUCER.encode(Hold(KEY))[:SEAL_BYTES], DamagedFrame, "a frame of 8 bytes is damaged"),
        (TO_PRODUCER.encode(Hold(KEY))[:-1], DamagedFrame, "is damaged"),
        (seal(b"", 9), OtherVersion, f"version 9 of the KV plane, ours is {PROTOCOL_VERSION}; run"),
        (seal(b"", PROTOCOL_VERSION), WireError, "not msgpack"),
    ],
)
def test_the_faults_of_a_frame_are_told_apart(frame: bytes, kind: type[WireError], complaint: str) -> None:
    codecs: tuple[SealedCodec[Any], ...] = (TO_PRODUCER, TO_CONSUMER)
    for codec in codecs:
        with pytest.raises(WireError, match=complaint) as caught:
            codec.decode(frame)
        assert type(caught.value) is kind


def test_unreadable_says_whether_it_will_help_to_say_it_again() -> None:
    for message in (Unreadable("why", True), Unreadable("why", False)):
        assert TO_CONSUMER.decode(TO_CONSUMER.encode(message)) == message
