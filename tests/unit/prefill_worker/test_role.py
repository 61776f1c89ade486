"""The prefill role takes producing requests only, and is drained when its leases are gone."""

import pytest

from baton.errors import Overloaded
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from baton.worker import KVBlockCounts, RequestCounts
from prefill_worker import PrefillRole

IDLE = RequestCounts(0, 0, 0)


def make_request(role: TransferRole | None) -> EngineRequest:
    peer = WorkerRef("d0", "i", ("tcp://127.0.0.1:1",), 16)
    transfer = KVTransferParams(role, "t", 0, peer) if role else None
    return EngineRequest(
        request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams(), kv_transfer=transfer
    )


def test_takes_a_producing_request() -> None:
    PrefillRole(max_waiting=1).admit(make_request(TransferRole.PRODUCER), IDLE)


@pytest.mark.parametrize("role", [TransferRole.CONSUMER, None])
def test_another_leg_may_find_its_worker_elsewhere(role: TransferRole | None) -> None:
    with pytest.raises(Overloaded, match="a prefill worker now"):
        PrefillRole(max_waiting=1).admit(make_request(role), IDLE)


def test_refuses_when_its_queue_is_full_and_says_when_to_come_back() -> None:
    with pytest.raises(Overloaded, match="the limit is 3") as caught:
        PrefillRole(max_waiting=3).admit(make_request(TransferRole.PRODUCER), RequestCounts(1, 3, 0))
    assert caught.value.retry_after_s > 0


def test_c50_is_not_drained_while_a_lease_is_open() -> None:
    worker = PrefillRole(max_waiting=1)
    assert worker.is_drained(IDLE, KVBlockCounts(total=9, free=9, leased=0, quarantined=0))
    assert not worker.is_drained(IDLE, KVBlockCounts(total=9, free=8, leased=1, quarantined=0))
    assert not worker.is_drained(RequestCounts(1, 0, 0), KVBlockCounts(9, 8, 0, 0))
