"""A prompt's pieces can all be listed in one Open; a longer prompt fails by itself, and ends no thread."""

import numpy as np
import pytest

from baton.clock import VirtualClock
from baton.config import KVTransferConfig
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from kv_transfer.commands import BeginLoad, LoadBlocks
from kv_transfer.connector.endpoint import make_endpoint
from kv_transfer.pool import KVBytes
from kv_transfer.protocol.effects import Failed, RankTransfer, Send
from kv_transfer.protocol.messages import (
    MAX_PIECES,
    MAX_PIECES_PER_MESSAGE,
    MAX_VERSION,
    TO_PRODUCER,
    Cancel,
    Open,
    Opened,
    Pieces,
)
from kv_transfer.protocol.transports import ZMQ_TCP, TransportOffer
from tests.factories.endpoint_under_fire import BLOCK_NBYTES
from tests.factories.recording_channel import RecordingChannel
from tests.factories.transfer import FINGERPRINT, HEARTBEAT_S, KEY, Wire, sent

PIECE_TOKENS = 16


def loading(num_pieces: int) -> Wire:
    """A consumer that loads a prompt of so many pieces, whose producer has answered."""
    wire = Wire()
    wire.begin_load(KEY, num_pieces * PIECE_TOKENS)
    wire.load(0, num_pieces)
    wire.at_consumer(wire.consumer.on_message(Opened(KEY, "host", ZMQ_TCP, b""), wire.clock.now()))
    return wire


def arrive(wire: Wire, num_pieces: int, version: int) -> None:
    for begin in range(0, num_pieces, MAX_PIECES_PER_MESSAGE):
        indices = tuple(range(begin, min(begin + MAX_PIECES_PER_MESSAGE, num_pieces)))
        wanted = wire.consumer.wanted(Pieces(KEY, version, indices, indices, indices), wire.clock.now())
        if wanted is not None:
            wire.at_consumer(wire.consumer.on_arrived(wanted, (), wire.clock.now()))


@pytest.mark.parametrize("version", [0, MAX_VERSION, 2**63 - 1])
def test_an_open_may_list_all_pieces_of_the_longest_prompt(version: int) -> None:
    """A producer that names a version which cannot be is not believed."""
    wire = loading(MAX_PIECES)
    arrive(wire, MAX_PIECES, version)
    wire.clock.advance(2 * HEARTBEAT_S)
    effects = wire.consumer.on_time(wire.clock.now())
    (question,) = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(question, Open)
    assert len(question.received) == (MAX_PIECES if version <= MAX_VERSION else 0)
    assert TO_PRODUCER.decode(TO_PRODUCER.encode(question)) == question


def test_a_prompt_of_too_many_pieces_fails_at_once_with_the_reason() -> None:
    wire = loading(MAX_PIECES + 1)
    assert sent(wire, Open) == []
    (failed,) = wire.notifications
    assert isinstance(failed, Failed)
    assert "2097168 tokens" in failed.reason
    assert "131073 pieces of blocks; at most 131072 can be handed over" in failed.reason
    assert not failed.is_link_failure
    assert failed.num_valid_tokens == 0
    wire.consumer.check_integrity()
    wire.begin_send(KEY, (MAX_PIECES + 1) * PIECE_TOKENS)
    wire.deliver()
    assert isinstance(sent(wire, Cancel)[0], Cancel)
    assert wire.unwanted == [RankTransfer("r")], "the producer would compute it in vain"


def test_the_transfer_thread_goes_on_behind_such_a_prompt() -> None:
    channel, clock = RecordingChannel(), VirtualClock()
    pool = KVBytes(np.zeros((8, BLOCK_NBYTES), np.uint8), FINGERPRINT)
    offer = TransportOffer("host", (ZMQ_TCP,))
    end = make_endpoint(KVTransferConfig(), "us", pool, channel, {}, offer, clock)
    peer = WorkerRef("p0", "peer", ("tcp://peer",), PIECE_TOKENS)
    transfer = KVTransferParams(TransferRole.CONSUMER, "t", 0, peer)
    end.execute(BeginLoad("r", transfer, (MAX_PIECES + 1) * PIECE_TOKENS))
    end.execute(LoadBlocks("r", 0, tuple(range(MAX_PIECES + 1))))
    (failed,) = end.collect_output().failed_recving
    assert (failed.request_id, failed.num_valid_blocks) == ("r", 0)
    clock.advance(1000.0)
    end.on_time()
    assert len(end) == 0
    end.check_integrity()
