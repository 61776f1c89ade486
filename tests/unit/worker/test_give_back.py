"""Requests that a worker gives back: each ends once, in whatever state it is, and it has no outputs after that."""

import pytest

from baton.kv import KVTransferParams, TransferRole
from baton.request import ErrorKind, FinishReason, RequestOutput
from tests.factories.engine import FakeBlockMover, make_core, make_engine_request
from tests.factories.scheduling import PEER, token_at
from worker.core import EngineCore

FROM_PEER = KVTransferParams(TransferRole.CONSUMER, "t", 0, PEER)
TO_PEER = KVTransferParams(TransferRole.PRODUCER, "u", 0, PEER)
ALSO_TO_PEER = KVTransferParams(TransferRole.PRODUCER, "v", 0, PEER)


def step(core: EngineCore, num_steps: int = 1) -> list[RequestOutput]:
    return [output for _ in range(num_steps) for news in core.step().values() for output in news]


def is_given_back(output: RequestOutput) -> bool:
    return output.finish_reason is FinishReason.ERROR and output.error_kind is ErrorKind.GIVEN_BACK


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_c52_whatever_state_a_request_is_in_it_is_given_back_once_and_says_nothing_more(
    async_scheduling: bool,
) -> None:
    connector = FakeBlockMover()
    core = make_core(
        connector=connector, async_scheduling=async_scheduling, max_num_seqs=4, max_num_batched_tokens=48
    )
    core.add_request(make_engine_request("runs", max_tokens=50), "gateway")
    outputs = step(core, 3)
    core.add_request(make_engine_request("loads", kv_transfer=FROM_PEER), "gateway")
    core.add_request(make_engine_request("computes", 100, kv_transfer=TO_PEER), "gateway")
    core.add_request(make_engine_request("waits", 200, kv_transfer=ALSO_TO_PEER), "other")
    outputs += step(core)
    assert core.scheduler.request_counts().waiting_for_remote_kvs == 1
    ends = core.give_back_requests("w0 drains")
    assert [output.request_id for output in ends["other"]] == ["waits"]
    ended = [output for news in ends.values() for output in news]
    assert sorted(output.request_id for output in ended) == ["computes", "loads", "runs", "waits"]
    assert all(map(is_given_back, ended))
    assert {output.error for output in ended} == {"w0 drains"}
    token_ids = [token_id for output in outputs for token_id in output.token_ids]
    assert token_ids == [token_at("runs", position) for position in range(len(token_ids))]
    (end,) = [output for output in ended if output.request_id == "runs"]
    assert (end.first_position, end.token_ids) == (len(token_ids), ())
    assert step(core, 3) == [], "what was under way gets no more outputs"
    assert core.give_back_requests("w0 drains") == {}
    blocks, counts = core.scheduler.kv_block_counts(), core.scheduler.request_counts()
    assert (counts.running, counts.waiting, counts.waiting_for_remote_kvs) == (0, 0, 0)
    assert blocks.free + blocks.leased + blocks.quarantined == blocks.total
    assert blocks.leased > 0, "its consumer may read until the blocks are released"
    assert core.counters()["requests_given_back"] == 4
    core.close()
