"""Pictures of the live page, to be looked at: `python -m tests.page.screenshots FOLDER`.

A real gateway and a real browser; the workers are paced ones (tests/factories/paced_fleet.py), so that four and eight
of them fit on a laptop.
"""

import argparse
import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway import GatewayClient
from tests.factories.browser import Page, browser
from tests.factories.gateway import GatewayUnderTest, gateway_with
from tests.factories.models import make_model_dir
from tests.factories.paced_fleet import Pace, PacedFleet

ANSWER = (
    "Sunlight is a mixture of colours. On its way through the air it meets molecules that are much smaller than its "
    "waves, and these scatter blue light far more than red. So blue reaches us from everywhere. "
)
IS_OVER = "document.querySelector('#run').innerText === 'Run'"
PROMPT = "Why is the sky blue? Answer in two sentences, please."


@asynccontextmanager
async def shown_fleet(num_prefill: int, num_decode: int, folder: Path) -> AsyncIterator[GatewayUnderTest]:
    """Workers w0, w1, ..., prefill first."""
    fleet = PacedFleet(folder, ANSWER, Pace(prefill_s=0.2, transfer_s=0.05))
    names = [f"w{number}" for number in range(num_prefill + num_decode)]
    prefill, decode = fleet.scripts(*names[:num_prefill]), fleet.scripts(*names[num_prefill:])
    async with gateway_with(folder, prefill, decode) as under_test:
        fleet.workers = under_test.workers
        yield under_test


@asynccontextmanager
async def load(under_test: GatewayUnderTest, requests_per_s: float) -> AsyncIterator[None]:
    """Requests of many lengths, at random moments."""

    async def ask(client: GatewayClient) -> None:
        prompt, max_tokens = tuple([5] * random.randint(10, 120)), random.randint(10, 100)
        async for _ in client.generate(token_ids=prompt, sampling={"max_tokens": max_tokens}):
            pass

    async def run() -> None:
        async with (
            GatewayClient(f"127.0.0.1:{under_test.gateway.grpc_port}") as client,
            asyncio.TaskGroup() as group,
        ):
            while True:
                group.create_task(ask(client))
                await asyncio.sleep(random.expovariate(requests_per_s))

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await under_test.until(lambda: under_test.dispatcher.num_in_flight == 0)


async def try_one(page: Page, prompt: str = PROMPT) -> None:
    """Types a prompt and runs it with the keyboard alone."""
    await page.evaluate(
        "document.querySelector('#prompt').focus(), document.querySelector('#prompt').select()"
    )
    await page.type(prompt)
    await page.press("Enter", 13, modifiers=2)
    await page.until("document.querySelector('#run').innerText === 'Stop'")


async def pictures(folder: Path, warm_up_s: float) -> None:
    async def take(page: Page, name: str, *, whole: bool = False) -> None:
        (folder / f"{name}.png").write_bytes(await page.screenshot(whole=whole))

    with TemporaryDirectory() as model_folder:
        model = make_model_dir(Path(model_folder))
        async with browser() as running:
            async with shown_fleet(2, 2, model) as under_test:
                page = await running.open(f"http://127.0.0.1:{under_test.gateway.http_port}/")
                await page.until("document.querySelectorAll('.worker').length === 4")
                await take(page, "2p2d-idle-light")
                await page.look(1440, 900, dark=True)
                await take(page, "2p2d-idle-dark")
                await page.look(1440, 900)
                async with load(under_test, 6):
                    await asyncio.sleep(warm_up_s)
                    await try_one(page)
                    await asyncio.sleep(0.4)
                    await take(page, "2p2d-load-running-light")
                    await page.until(IS_OVER)
                    await take(page, "2p2d-load-light")
                    await page.look(390, 844, dark=True)
                    await asyncio.sleep(1.5)
                    await take(page, "2p2d-load-phone-dark", whole=True)
            async with shown_fleet(4, 8, model) as under_test:
                page = await running.open(f"http://127.0.0.1:{under_test.gateway.http_port}/")
                async with load(under_test, 20):
                    await asyncio.sleep(warm_up_s)
                    await try_one(page)
                    await page.until(IS_OVER)
                    await take(page, "4p8d-load-light")
                    await page.look(1440, 900, dark=True)
                    await asyncio.sleep(1.0)
                    await take(page, "4p8d-load-dark")
                    await page.look(800, 1000, reduced_motion=True)
                    await asyncio.sleep(2.0)
                    await take(page, "4p8d-load-tablet-reduced-motion", whole=True)
            assert not any(running.complaints.values()), running.complaints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds of load before a picture")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(pictures(options.folder, options.warm_up))


if __name__ == "__main__":
    main()
