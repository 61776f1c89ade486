"""A worker's counters come from its scheduler and its connector: no name means two things, and outputs agree."""

from baton.kv import KVTransferParams, TransferRole
from baton.request import FirstToken
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV
from tests.factories.engine import FakeBlockMover, make_core, make_engine_request
from tests.factories.scheduling import PEER, FakeRunner, token_at


def test_prompts_are_counted_by_the_scheduler_and_rank_transfers_by_the_connector_under_other_names() -> None:
    connector = FakeBlockMover()
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
    assert connector.counters()["kv_loads_started"] == 0
    assert not counters.keys() & connector.counters().keys(), "a status shows both in one table"


def test_outputs_say_what_became_of_their_requests_drafts() -> None:
    """The outputs agree with the worker's counts, even if a right draft is the last token of the answer."""

    def half_right(request_id: str, position: int) -> tuple[int, ...]:
        return (token_at(request_id, position), 7) if request_id == "drafted" else ()

    core = make_core(FakeRunner(guess=half_right), num_speculative_tokens=2, async_scheduling=False)
    for request_id in ("drafted", "plain"):
        core.add_request(make_engine_request(request_id, max_tokens=4), "gateway")
    said: dict[str, list[tuple[int, int, int]]] = {"drafted": [], "plain": []}
    for _ in range(4):
        for output in core.step().get("gateway", ()):
            counts = (
                len(output.token_ids),
                output.num_draft_tokens,
                output.num_accepted_draft_tokens,
            )
            said[output.request_id].append(counts)
    assert said == {"drafted": [(1, 0, 0), (2, 2, 1), (1, 2, 1)], "plain": [(1, 0, 0)] * 4}
    counters = core.counters()
    assert (counters["spec_decode_num_draft_tokens"], counters["spec_decode_num_accepted_tokens"]) == (4, 2)
