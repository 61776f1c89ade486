"""The live page in a real browser, as a user sees it. Skipped if no browser is installed."""

import re
from pathlib import Path

import pytest

from gateway import Tokenizer
from tests.factories.api_keys import ALICE, API_KEYS, AS_ADMIN, WATCHER
from tests.factories.browser import browser, find_browser
from tests.factories.gateway import answering, gateway_with
from tests.factories.paced_fleet import Pace, PacedFleet

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium is installed: apt install chromium"
)

HOSTILE = (
    "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script> & done"
)
WORKER = "w<b>1"

IN_BACKGROUND = """
window.isVisible = false;
Object.defineProperty(document, "hidden", { get: () => !window.isVisible });
window.numFetches = 0;
const fetchReally = window.fetch;
window.fetch = (...call) => { window.numFetches += 1; return fetchReally(...call); };
"""
"""Makes a page believe that its tab is in the background, and counts what it fetches."""


async def test_a_prompt_is_typed_and_its_stages_and_tokens_are_seen_as_text(folder: Path) -> None:
    fleet = PacedFleet(folder, HOSTILE, Pace(prefill_s=0.3, step_s=0.01))
    prefill, decode = fleet.scripts("w0"), fleet.scripts(WORKER)
    async with gateway_with(folder, prefill, decode) as under_test, browser() as running:
        fleet.workers = under_test.workers
        page = await running.open(f"{under_test.http_url}/")
        await page.until("document.querySelectorAll('.worker').length === 2")
        assert WORKER in await page.text("#decode")
        assert "● ready" in await page.text("#prefill")
        assert "999 free of 999 blocks" in await page.text("#prefill")

        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("Hello")
        await page.press("Enter", 13, modifiers=2)
        await page.until("document.querySelector('[data-stage=prefill]').dataset.state === 'active'")
        assert "on w0" in await page.text("[data-stage=prefill]")
        await page.until("document.querySelector('[data-stage=decode]').dataset.state === 'active'")
        await page.until("document.querySelector('#run').innerText === 'Run'")

        assert (await page.text("#answer")).startswith(HOSTILE)
        assert await page.evaluate("document.querySelectorAll('.worker b b').length") == 0
        assert await page.evaluate("document.title") == "Baton"
        states = "[...document.querySelectorAll('.stage-row')].map((row) => row.dataset.state)"
        assert await page.evaluate(states) == ["done"] * 4
        assert "shared memory" in await page.text("[data-stage=transfer]")
        assert f"128 tokens on {WORKER}" in await page.text("[data-stage=decode]")
        assert "First token after" in await page.text("#summary")
        assert re.search(r"first token .* = .*prefill", await page.text("#sums"))
        bars = "[...document.querySelectorAll('.stage-row .solid')].every((bar) => bar.clientWidth > 0)"
        assert await page.evaluate(bars)

        await page.until("document.querySelectorAll('.link.busy').length === 1")
        await page.until("document.querySelector('#paths dd').innerText.trim() === '1'")
        await page.evaluate("document.querySelector('details').open = true")
        await page.until("document.querySelector('#pairs').innerText.includes('1 hand-over')")
        assert page.complaints == []


async def test_markup_that_comes_at_once_stays_text(folder: Path) -> None:
    answer = list(Tokenizer(folder).encode(HOSTILE))

    async with gateway_with(folder, {}, {WORKER: answering(answer)}) as under_test, browser() as running:
        page = await running.open(f"{under_test.http_url}/")
        await page.evaluate(f"document.querySelector('[name=max_tokens]').value = {len(answer)}")
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("Hello")
        await page.press("Enter", 13, modifiers=2)
        await page.until("document.querySelector('#summary').innerText.includes('ended by length')")
        assert await page.text("#answer") == HOSTILE
        assert await page.evaluate("document.querySelectorAll('#answer *').length") == 0
        assert page.complaints == []


async def test_a_page_that_lost_its_gateway_says_so_and_an_error_is_shown(folder: Path) -> None:
    async with browser() as running:
        async with gateway_with(folder, {}, {}, placement_timeout_s=0.2) as under_test:
            page = await running.open(f"{under_test.http_url}/")
            await page.until("document.querySelector('#connection').innerText === '● live'")
            await page.evaluate("document.querySelector('#prompt').focus()")
            await page.type("Hello")
            await page.press("Enter", 13, modifiers=2)
            await page.until("document.querySelector('#summary').innerText.startsWith('✕')")
            assert "decode worker" in await page.text("#summary")
            assert (
                await page.evaluate("document.querySelector('[data-stage=queue]').dataset.state") == "failed"
            )
        await page.until("document.querySelector('#connection').innerText.includes('no connection')")


async def test_pairs_of_workers_that_left_are_forgotten_in_the_end(folder: Path) -> None:
    """In a fleet that scales, new workers have new names, and a tab may be open for weeks."""
    async with gateway_with(folder, {}, {}) as under_test, browser() as running:
        page = await running.open(f"{under_test.http_url}/")
        known = await page.evaluate("""import("./page/links.js").then(({ Links }) => {
            const links = new Links({ element: () => null });
            for (let second = 0; second < 2000; second += 1) {
                const handover = { decode: "d", done: 1, failed: 0, num_bytes: 1 };
                const handovers = [{ prefill: "old", ...handover }, { prefill: `w${second}`, ...handover }];
                links.draw({ handovers, last_minute: { newest: second }, workers: [] }, false);
            }
            return [...links.pairs.keys()];
        })""")
    assert (len(known), known[-1]) == (1024, "w1999 d")
    assert "old d" in known


async def test_a_page_that_may_not_watch_at_present_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.telemetry.live_feed.MAX_VIEWERS", 0)
    async with gateway_with(folder, {}, {}) as under_test, browser() as running:
        page = await running.open(f"{under_test.http_url}/")
        await page.until("document.querySelector('#refusal').innerText.includes('are watching already')")
        assert await page.text("#connection") == "✕ cannot watch, trying again"


async def test_a_page_in_a_background_tab_watches_once_it_is_visible(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test, browser() as running:
        page = await running.open(f"{under_test.http_url}/")
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=IN_BACKGROUND)
        await page.call("Page.reload")
        await page.until("window.numFetches === 0 && document.documentElement?.dataset.theme")
        await page.evaluate("isVisible = true; document.dispatchEvent(new Event('visibilitychange'))")
        await page.until("document.querySelector('#connection').innerText === '● live'")


async def test_a_page_asks_for_a_key_where_one_is_needed_and_keeps_it_in_its_tab(folder: Path) -> None:
    async with (
        gateway_with(
            folder, {}, {"w0": answering([7, 8])}, api_keys=API_KEYS, credentials=AS_ADMIN
        ) as under_test,
        browser() as running,
    ):
        page = await running.open(f"{under_test.http_url}/")
        for key, shown in (
            ("baton-wrong", "unknown or revoked"),
            ("“baton-wrong”", "Keys are plain ASCII"),
            (WATCHER, ""),
        ):
            await page.until("document.querySelector('#key-dialog').open")
            await page.evaluate("document.querySelector('#key-input').select()")
            await page.type(key)
            await page.press("Enter", 13)
            await page.until(f"document.querySelector('#key-reason').innerText.includes('{shown}')")
        await page.until("document.querySelector('#connection').innerText === '● live'")
        assert not await page.evaluate("document.querySelector('#key-dialog').open")
        assert await page.evaluate("localStorage.getItem('baton-api-key')") is None
        assert WATCHER not in await page.evaluate("document.cookie + location.href")

        await page.evaluate("document.querySelector('#prompt').focus()")  # that key may only look
        await page.type("Hello")
        await page.press("Enter", 13, modifiers=2)
        await page.until("document.querySelector('#summary').innerText.includes('generate')")

        await page.evaluate(f"sessionStorage.setItem('baton-api-key', '{ALICE}')")
        await page.call("Page.reload")
        await page.until("document.querySelector('#refusal')?.innerText.includes('observe')")
        await page.evaluate("document.querySelector('#prompt').focus()")  # and that key may ask, but not look
        await page.type("Hello")
        await page.evaluate("document.querySelector('[name=max_tokens]').value = 2")
        await page.press("Enter", 13, modifiers=2)
        await page.until("document.querySelector('#summary').innerText.includes('ended by length')")
