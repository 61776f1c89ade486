"""Behaviour 49: processes send each other durations, not times. The bytes do not depend on the processes' clocks."""

from collections.abc import Callable

import pytest

from baton.clock import VirtualClock
from baton.kv import KVTransferParams, TransferRole
from baton.messages.request_plane import TO_GATEWAY, Outputs
from baton.request import RequestOutput
from baton.step import KVConnectorOutput
from kv_transfer.commands import AbortSend, BeginLoad, BeginSend, FinishSend, LoadBlocks, SendBlocks
from tests.factories.endpoints import LEASE_S, LOAD_TIMEOUT_S, TOKEN, Fabric, Worker
from tests.factories.engine import FakeBlockMover, StepHook, make_core, make_engine_request
from tests.factories.hand_overs import both_ends
from tests.factories.scheduling import PEER

ORIGINS = (0.0, 2.0**20, 2.0**30)
"""Binary fractions are added to them exactly, so that durations come out alike to the last bit."""


def begin(fabric: Fabric) -> tuple[Worker, Worker]:
    """Begins the hand-over of a prompt of 32 tokens. The decode worker waits for a while, and then has room."""
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    to_producer, to_consumer = both_ends(prefill.ref, decode.ref)
    prefill.compute(32)
    decode.command(BeginLoad("r", to_consumer, 32))
    fabric.advance(1.5)
    prefill.command(BeginSend("r", to_producer, 32))
    decode.load(LoadBlocks("r", 0, (1, 2)))
    fabric.advance(0.25)
    prefill.save(SendBlocks("r", 0, (1,)))
    fabric.advance(0.25)
    return prefill, decode


def succeeds(fabric: Fabric) -> None:
    prefill, decode = begin(fabric)
    prefill.command(FinishSend("r", 2, (2,), TOKEN))
    fabric.deliver()
    assert decode.output().finished_recving


def is_aborted(fabric: Fabric) -> None:
    prefill, _ = begin(fabric)
    prefill.command(AbortSend("r", "the prefill failed", is_unneeded=False, is_held=True))
    fabric.deliver()


def takes_too_long(fabric: Fabric) -> None:
    _, decode = begin(fabric)
    fabric.advance(LOAD_TIMEOUT_S)
    assert decode.output().failed_recving


def loses_its_consumer(fabric: Fabric) -> None:
    prefill, _ = begin(fabric)
    fabric.network.cut("sim://p0/0")
    prefill.command(FinishSend("r", 2, (2,), TOKEN))
    fabric.advance(LEASE_S + LOAD_TIMEOUT_S)
    assert prefill.output().finished_sending


@pytest.mark.parametrize("story", [succeeds, is_aborted, takes_too_long, loses_its_consumer])
def test_c49_no_message_of_a_hand_over_depends_on_what_a_clock_reads(
    story: Callable[[Fabric], None],
) -> None:
    sent = []
    for origin in ORIGINS:
        fabric = Fabric(
            "zmq_tcp", began_at=origin
        )  # other transports describe their pools, each of which differs
        story(fabric)
        sent.append(fabric.network.sent)
    assert len(sent[0]) > 8
    assert sent[0] == sent[1] == sent[2]


def outputs_of(origin: float, role: TransferRole) -> bytes:
    """A worker's outputs for a request whose load fails, or whose prompt the worker hands over."""
    clock, connector = VirtualClock(origin), FakeBlockMover()
    core = make_core(StepHook(lambda _: clock.advance(0.5)), connector, clock, async_scheduling=False)
    fabric = Fabric("zmq_tcp", began_at=origin)
    core.add_request(make_engine_request(kv_transfer=KVTransferParams(role, "t", 0, PEER)), "gateway")
    clock.advance(1.0)
    outputs: list[RequestOutput] = core.step().get("gateway", [])
    clock.advance(3.0)
    connector.outputs.append(output_of(fabric, role))
    for _ in range(6):
        outputs += core.step().get("gateway", [])
    assert outputs[-1].stage_times is not None
    assert len(outputs[-1].stage_times.transfers) == 1
    return TO_GATEWAY.encode(Outputs(tuple(outputs)))


def output_of(fabric: Fabric, role: TransferRole) -> KVConnectorOutput:
    """The output of one end of a real hand-over of the same request."""
    prefill, decode = begin(fabric)
    prefill.command(AbortSend("r", "the prefill failed", is_unneeded=False, is_held=True))
    fabric.deliver()
    return (prefill if role is TransferRole.PRODUCER else decode).output()


@pytest.mark.parametrize("role", list(TransferRole))
def test_c49_what_a_worker_reports_of_its_stages_and_transfers_are_durations(role: TransferRole) -> None:
    first, *others = [outputs_of(origin, role) for origin in ORIGINS]
    assert others == [first, first]
