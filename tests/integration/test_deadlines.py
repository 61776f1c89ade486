"""A request that cannot meet its deadline is refused at once, before it reaches a worker."""

from dataclasses import replace
from pathlib import Path

from baton.request import EngineRequest, RequestOutput, StageTimes
from baton.worker import WorkerLoad
from gateway.routing.prefill_times import MIN_SEEN
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with, refusal

LONG, SHORT = list(range(4, 104)), [4, 5, 6]


def slow(request: EngineRequest) -> list[RequestOutput]:
    """Answers at once, and reports that the prompt took 200 seconds."""
    (output,) = answering([7])(request)
    return [replace(output, stage_times=StageTimes(prefill_s=200.0))]


def load_reported_by(under_test: GatewayUnderTest) -> WorkerLoad | None:
    client = under_test.gateway.workers.client("d0")
    return client.status.load if client is not None and client.status is not None else None


async def ask(under_test: GatewayUnderTest, token_ids: list[int], timeout_s: float | None) -> None:
    await under_test.ask(None, token_ids=token_ids, sampling={"max_tokens": 1}, timeout_s=timeout_s)


async def test_a_prompt_that_takes_longer_than_its_deadline_is_refused_at_once(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": slow}) as under_test:
        worker = under_test.workers["d0"]
        worker.load = WorkerLoad(prefill_tokens_per_s=0.5)
        await under_test.until(lambda: load_reported_by(under_test) == worker.load)
        prefill_times = under_test.dispatcher._fleet.prefill_times
        prefill_times.forget("d0")  # it reported another rate before
        await under_test.until(lambda: "d0" in prefill_times._workers)
        for _ in range(MIN_SEEN):
            await ask(under_test, LONG, timeout_s=90.0)
            await worker.next_request()
        refused = await refusal(ask(under_test, LONG + LONG, timeout_s=90.0))
        assert refused.code == "DEADLINE_EXCEEDED"
        assert refused.details.reason == "DEADLINE_TOO_CLOSE"
        reason = "the prompt takes at least 100.0 s to compute, and the request's deadline is in "
        assert reason in str(refused)
        async with under_test.http() as client:
            answer = await client.post(
                "/v1/completions",
                headers={"x-request-timeout-ms": "90000"},
                json={"model": "tiny", "prompt": LONG + LONG, "max_tokens": 1},
            )
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_too_close")
        assert answer.headers["x-should-retry"] == "false", "that would be too late, too"
        assert worker.received.empty(), "no worker was asked"
        for token_ids, timeout_s in ((SHORT, 90.0), (LONG + LONG, 110.0), (LONG + LONG, None)):
            await ask(under_test, token_ids, timeout_s)
            await worker.next_request()
        counters = (await under_test.client.describe())["gateway"]["counters"]
        assert counters["rejected"] == 2
