"""A worker's counters come from its scheduler and its connector: no name may mean two things."""

from baton.kv import KVTransferParams, TransferRole
from baton.request import FirstToken
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV
from tests.factories.engine import FakeConnectorWorker, make_core, make_engine_request
from tests.factories.scheduling import PEER


def test_prompts_are_counted_by_the_scheduler_and_rank_transfers_by_the_connector_under_other_names() -> None:
    connector = FakeConnectorWorker()
    core = make_core(connector=connector)
    for request_id in ("arrives", "fails", "ends elsewhere"):
        transfer = KVTransferParams(TransferRole.CONSUMER, request_id, 0, PEER)
        core.add_request(make_engine_request(request_id, kv_transfer=transfer), "gateway")
    core.step()
    arrived = ReceivedKV("arrives", FirstToken(7, None), 1_000, 1.0, 0.5)
    failures = FailedKV("fails", 0, "the prefill failed"), FailedKV("ends elsewhere", 0, "EOS", True)
    connector.outputs.append(KVConnectorOutput(finished_recving=(arrived,), failed_recving=failures))
    core.step()
    counters = core.counters()
    by_prompt = {name: count for name, count in counters.items() if name.startswith("kv_prompt_loads_")}
    assert by_prompt == {
        "kv_prompt_loads_started": 3,
        "kv_prompt_loads_done": 1,
        "kv_prompt_loads_failed": 1,
        "kv_prompt_loads_not_needed": 1,
    }
    assert counters["kv_loads_started"] == connector.counters()["kv_loads_started"] == 0
