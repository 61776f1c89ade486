"""The decode role takes consuming and whole requests, and is drained when nothing runs or may be written."""

import pytest

from baton.errors import Overloaded
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from baton.worker import KVBlockCounts, RequestCounts
from decode_worker import DecodeRole

IDLE = RequestCounts(0, 0, 0)


def make_request(role: TransferRole | None) -> EngineRequest:
    peer = WorkerRef("p0", "i", ("tcp://127.0.0.1:1",), 16)
    transfer = KVTransferParams(role, "t", 0, peer) if role else None
    return EngineRequest(
        request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams(), kv_transfer=transfer
    )


@pytest.mark.parametrize("role", [TransferRole.CONSUMER, None])
def test_takes_consuming_legs_and_whole_requests(role: TransferRole | None) -> None:
    DecodeRole(max_waiting=1).admit(make_request(role), IDLE)


def test_a_prompt_for_others_may_find_its_worker_elsewhere() -> None:
    with pytest.raises(Overloaded, match="a decode worker now"):
        DecodeRole(max_waiting=1).admit(make_request(TransferRole.PRODUCER), IDLE)


def test_requests_that_wait_for_blocks_count_as_waiting() -> None:
    with pytest.raises(Overloaded, match="2 requests wait"):
        DecodeRole(max_waiting=2).admit(make_request(None), RequestCounts(5, 1, 1))


def test_c50_is_not_drained_while_blocks_may_still_be_written() -> None:
    worker = DecodeRole(max_waiting=1)
    assert worker.is_drained(IDLE, KVBlockCounts(total=9, free=9, leased=0, quarantined=0))
    assert not worker.is_drained(IDLE, KVBlockCounts(total=9, free=8, leased=0, quarantined=1))
    assert not worker.is_drained(RequestCounts(0, 0, 1), KVBlockCounts(9, 8, 0, 0))
