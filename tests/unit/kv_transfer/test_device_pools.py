"""Hand-overs out of, and into, a pool on a device: copies take their time, and blocks change hands meanwhile."""

import pytest

from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    FinishSend,
    SendBlocks,
    WithdrawBlocks,
)
from kv_transfer.protocol.messages import TO_CONSUMER, Pieces
from kv_transfer.protocol.transports import CUDA_IPC, ZMQ_TCP
from tests.factories.endpoints import TOKEN, Fabric, Worker
from tests.factories.hand_overs import begin

NUM_TOKENS = 64


def started(transport: str) -> tuple[Fabric, Worker, Worker]:
    """A hand-over of four blocks that both ends know of, and that the decode worker has room for."""
    fabric = Fabric(transport, on_device=True)
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode, NUM_TOKENS)
    return fabric, prefill, decode


def give(prefill: Worker) -> None:
    prefill.compute(NUM_TOKENS)
    prefill.save(SendBlocks("r", 0, prefill.blocks_for(NUM_TOKENS)))


def finish(prefill: Worker) -> None:
    prefill.command(FinishSend("r", 4, (), TOKEN))


def num_offered(fabric: Fabric) -> int:
    """Messages that announce pieces."""
    headers = [header for address, header in fabric.network.sent if address.startswith("sim://d0")]
    return sum(isinstance(TO_CONSUMER.decode(header), Pieces) for header in headers)


@pytest.mark.parametrize("transport", [ZMQ_TCP, CUDA_IPC])
def test_nothing_is_offered_before_its_bytes_are_out_nor_acknowledged_before_they_are_in(
    transport: str,
) -> None:
    fabric, prefill, decode = started(transport)
    p_driver, d_driver = fabric.drivers
    p_driver.is_slow = d_driver.is_slow = True
    give(prefill)
    finish(prefill)
    fabric.advance(0.01)
    assert num_offered(fabric) == 0, "its checksums are not known"
    p_driver.run()
    fabric.advance(0.01)
    assert num_offered(fabric) == 1
    assert not decode.output().finished_recving
    while not (received := decode.output().finished_recving):
        assert d_driver.queued, "nothing is under way, and nothing has arrived"
        d_driver.run()
        fabric.advance(0.01)
    assert [load.request_id for load in received] == ["r"]
    assert decode.holds(NUM_TOKENS)
    fabric.advance(0.01)
    assert prefill.output().finished_sending == ("r",)
    fabric.assert_at_rest()


@pytest.mark.parametrize("transport", [ZMQ_TCP, CUDA_IPC])
def test_c41_blocks_taken_back_while_they_are_copied_out_are_not_vouched_for(transport: str) -> None:
    """If the checksum were computed after others wrote into the blocks, it would match the wrong bytes."""
    fabric, prefill, decode = started(transport)
    fabric.drivers[0].is_slow = True
    give(prefill)
    fabric.advance(0.01)
    prefill.command(WithdrawBlocks("r"))
    prefill.blocks[0][:] = 0x2A
    fabric.drivers[0].run()
    fabric.advance(0.01)
    assert num_offered(fabric) == 0
    fabric.drivers[0].is_slow = False
    give(prefill)
    finish(prefill)
    fabric.advance(0.1)
    assert [load.request_id for load in decode.output().finished_recving] == ["r"]
    assert decode.holds(NUM_TOKENS)
    assert prefill.output().finished_sending == ("r",)
    fabric.assert_at_rest()


def test_c33_a_hand_over_that_ends_while_it_is_copied_out_is_never_sent() -> None:
    fabric, prefill, decode = started(ZMQ_TCP)
    fabric.drivers[0].is_slow = True
    give(prefill)
    fabric.advance(0.01)
    prefill.command(AbortSend("r", "the client left", is_unneeded=True, is_held=True))
    fabric.drivers[0].run()
    fabric.advance(0.1)
    assert num_offered(fabric) == 0
    assert prefill.output().finished_sending == ("r",)
    assert [failed.request_id for failed in decode.output().failed_recving] == ["r"]
    fabric.assert_at_rest()


def test_c32_a_load_that_is_given_up_is_quiet_only_when_nothing_writes_its_blocks() -> None:
    fabric, prefill, decode = started(ZMQ_TCP)
    driver = fabric.drivers[1]
    driver.is_slow = True
    give(prefill)
    fabric.advance(0.01)
    assert driver.queued, "the bytes are on their way into the device"
    decode.command(AbortLoad("r", "the client left"))
    fabric.advance(0.1)
    assert not decode.output().quiesced
    driver.run()
    fabric.advance(0.01)
    assert decode.output().quiesced == ("r",)
    decode.blocks[0][:] = 0x2A
    driver.run()
    assert (decode.blocks[0] == 0x2A).all()


@pytest.mark.parametrize("end", [0, 1], ids=["producer", "consumer"])
def test_a_copy_that_is_refused_is_tried_again(end: int) -> None:
    fabric, prefill, decode = started(ZMQ_TCP)
    driver = fabric.drivers[end]
    driver.room = 0
    fabric.network.delay_s = 0.001  # a consumer asks at once, and gives up after 16 pieces that did not come
    give(prefill)
    finish(prefill)
    fabric.advance(0.005)
    assert not decode.output().finished_recving
    driver.room = None
    fabric.advance(1.0)
    assert [load.request_id for load in decode.output().finished_recving] == ["r"]
    assert decode.holds(NUM_TOKENS)
    fabric.advance(0.1)
    fabric.assert_at_rest()
