"""A gateway's report: its clients' latencies, its queue, and its workers' latest heartbeats."""

import asyncio
from pathlib import Path

from tests.factories.gateway import gateway_with, outputs_of, silent


async def test_a_report_holds_what_clients_waited_for(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        gateway, worker = under_test.gateway, under_test.workers["d0"]
        got = asyncio.Event()

        async def read() -> None:
            async for _ in under_test.client.generate(text="Hello", sampling={"max_tokens": 3}):
                got.set()

        reading = asyncio.create_task(read())
        request = await worker.next_request()
        before = gateway.report()
        assert (before.num_first_tokens, before.ttft_s) == (0, (0.0, 0.0))
        first, second, third = outputs_of(request, [5, 6, 7])
        await asyncio.sleep(0.3)
        worker.say(request, [first])
        await got.wait()
        assert gateway.report().num_first_tokens == 1
        worker.say(request, [first])  # said twice, counted once
        await asyncio.sleep(0.1)
        worker.say(request, [second, third])
        await reading
        report = gateway.report(30.0)
        assert report.num_first_tokens == 1
        assert report.gateway == before.gateway != ""
        assert 0.3 <= report.ttft_s[0] * 1.01 < 60.0
        assert 0.1 <= report.itl_s[1] * 1.01 < 60.0
        assert [status.ref.name for status in report.workers] == ["d0"]


async def test_a_report_does_not_count_requests_that_wait_for_room_at_the_gateway(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}, max_in_flight=1) as under_test:
        gateway, worker = under_test.gateway, under_test.workers["d0"]
        asking = [asyncio.create_task(under_test.ask()) for _ in range(2)]
        request = await worker.next_request()
        await under_test.until(lambda: gateway._driver.oldest_queued_s > 0.0)
        assert gateway.report().oldest_queued_s == 0.0, "another worker would not help"
        worker.say(request, outputs_of(request, [5]))
        request = await worker.next_request()
        worker.say(request, outputs_of(request, [5]))
        await asyncio.gather(*asking)


async def test_a_report_counts_requests_that_wait_for_a_prefill_worker(folder: Path) -> None:
    """Another decode worker would not help these requests."""
    async with gateway_with(folder, {}, {"d0": silent}, require_disaggregated=True) as under_test:
        gateway = under_test.gateway
        asking = asyncio.create_task(under_test.ask())
        await under_test.until(lambda: gateway.report().oldest_without_prefill_s > 0.0)
        assert gateway.report().oldest_queued_s == 0.0
        asking.cancel()
        await asyncio.wait([asking])
        await under_test.until(lambda: under_test.dispatcher.num_queued == 0)
