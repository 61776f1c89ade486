"""A real browser without a window, driven over a pipe (the DevTools protocol), for tests of the live page."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 64 * 2**20

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

_LAUNCHER = """
import fcntl, os, sys
reader, writer = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reader, 3)
os.dup2(writer, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Runs a browser, with its pipe at 3 and 4: the file descriptors at which the browser expects it."""


def find_browser() -> str | None:
    """The path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Page:
    """One tab of the browser."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, params, self._session)

    async def evaluate(self, expression: str) -> Any:
        """The value of the expression, awaited if it is a promise.

        An exception in the page raises AssertionError.
        """
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def text(self, selector: str) -> str:
        """The text that a user would read in the element."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def until(self, condition: str) -> None:
        """Waits until the expression is true."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not await self.evaluate(f"Boolean({condition})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            seen = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never came true: {condition}\n{seen}") from None

    async def type(self, text: str) -> None:
        """Types into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Presses a key. `modifiers`: 2 is Ctrl."""
        text = {"text": "\r"} if key == "Enter" and not modifiers else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
                **(text if kind == "keyDown" else {}),
            )

    async def look(
        self, width: int, height: int, *, dark: bool = False, reduced_motion: bool = False
    ) -> None:
        """Sets the window's size and the user's preferences."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of the page. With `whole`, it includes what is below the window's edge."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    @property
    def complaints(self) -> list[str]:
        """Errors of the page: exceptions, refused loads, violations of its own security policy."""
        return self._browser.complaints.setdefault(self._session, [])


class Browser:
    """One browser process; `running` starts and ends it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: dict[str, list[str]] = {}

    async def open(self, url: str, width: int = 1440, height: int = 900) -> Page:
        target = await self.call("Target.createTarget", {"url": "about:blank"})
        attached = await self.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.look(width, height)
        await page.call("Page.navigate", url=url)
        await page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    async def call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(TIMEOUT_S):
            return await self._answers[number]

    async def listen(self) -> None:
        """Reads the browser's messages until the browser ends."""
        while frame := await self._frame():
            message = json.loads(frame)
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]))
                else:
                    answer.set_result(message["result"])
            else:
                self._note(message)

    async def _frame(self) -> bytes:
        try:
            return (await self._reader.readuntil(b"\0"))[:-1]
        except asyncio.IncompleteReadError:
            return b""

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        complaints = self.complaints.setdefault(message.get("sessionId", ""), [])
        if message["method"] == "Runtime.exceptionThrown":
            complaints.append(str(params["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser with its own profile, which is deleted at the end."""
    command = find_browser()
    assert command is not None
    (to_read, its_writer), (its_reader, to_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _LAUNCHER,
            str(its_reader),
            str(its_writer),
            command,
            *_OPTIONS,
            f"--user-data-dir={profile}",
            pass_fds=(its_reader, its_writer),
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in (its_reader, its_writer):
            os.close(descriptor)
        found = Browser(*await _streams(to_read, to_write))
        listening = asyncio.create_task(found.listen())
        try:
            yield found
            await found.call("Browser.close", {})
            async with asyncio.timeout(TIMEOUT_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            listening.cancel()


async def _streams(to_read: int, to_write: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_read, "rb"))
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(to_write, "wb")
    )
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)
