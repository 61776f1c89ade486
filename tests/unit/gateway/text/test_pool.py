"""Tokenizing: beside the event loop, within bounds of number, length and time, and with the model's own template."""

import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from baton.errors import InvalidRequest, Overloaded
from gateway.conversation import ChatMessage, Conversation, ToolCall
from gateway.text import Tokenizer, TokenizerPool
from gateway.text import pool as pool_module
from gateway.text.pool import MAX_INLINE_CHARACTERS, NUM_THREADS
from gateway.text.time_limit import run_within
from tests.factories.models import make_tokenizer_dir

HELLO = Conversation((ChatMessage("user", "hello"),))
MAX_TOKENS = 2000
MAX_WAITING = 64
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def tokenizer(folder: Path, template: str | None = None) -> Tokenizer:
    return Tokenizer(make_tokenizer_dir(folder, template))


@asynccontextmanager
async def pool_of(tokenizer: Tokenizer) -> AsyncIterator[TokenizerPool]:
    pool = TokenizerPool(tokenizer, MAX_TOKENS, MAX_WAITING)
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.parametrize(
    "arguments", ['{"a": [' + "[]," * 90_000 + "0]}", '{"a": [' + '"",' * 600_000 + "0]}"]
)
async def test_arguments_with_very_many_values_are_not_parsed(tmp_path: Path, arguments: str) -> None:
    """No other thread runs while a text is parsed, so that would take time from all streams."""
    call = ToolCall("c", "f", arguments)
    conversation = Conversation((*HELLO.messages, ChatMessage("assistant", "", None, (call, call))))
    async with pool_of(tokenizer(tmp_path)) as pool:
        with pytest.raises(InvalidRequest, match=r"^chat: the arguments of .* more than 262144 values"):
            await pool.encode_chat("alice", conversation)


@pytest.mark.parametrize("number", [1, MAX_INLINE_CHARACTERS])
async def test_a_text_for_which_a_tokenizer_has_no_tokens_is_the_clients_fault(
    tmp_path: Path, number: int
) -> None:
    """A vocabulary without bytes and without a token for unknown text."""
    folder = make_tokenizer_dir(tmp_path)
    RustTokenizer(models.Unigram([("e", 0.0), ("s", 0.0), ("r", 0.0)])).save(str(folder / "tokenizer.json"))
    async with pool_of(Tokenizer(folder)) as pool:
        assert await pool.encode("alice", "ees" * number) == (0, 0, 1) * number
        with pytest.raises(InvalidRequest, match=r"^prompt: .* cannot encode the text: .* unknown token"):
            await pool.encode("alice", "日本" * number)
        with pytest.raises(InvalidRequest, match=r"^chat: .* cannot encode the text: .* unknown token"):
            await pool.encode_chat("alice", Conversation((ChatMessage("user", "日本" * number),)))


async def test_long_texts_and_short_ones_become_the_librarys_tokens(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)

    async with pool_of(own) as pool:
        for text in ("the cache", "the cache " * (MAX_INLINE_CHARACTERS // 5)):
            token_ids = await pool.encode("alice", text)
            assert token_ids == tuple(own.backend.encode(text).ids)
            assert await pool.decode("alice", token_ids, skip_special_tokens=False) == text


def test_a_tokenizer_files_training_settings_do_not_shorten_prompts(tmp_path: Path) -> None:
    folder = make_tokenizer_dir(tmp_path)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    own = Tokenizer(folder)
    assert own.decode(own.encode("zq wv xk jp"), skip_special_tokens=True) == "zq wv xk jp"


async def test_texts_that_cannot_fit_are_refused_without_tokenizing(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)
    own.encode = None  # type: ignore[assignment,method-assign]
    longest = max(len(piece) for piece in own.backend.get_vocab())

    async with pool_of(own) as pool:
        assert pool.max_characters == MAX_TOKENS * longest
        with pytest.raises(
            InvalidRequest, match=rf"prompt is too long: {pool.max_characters + 1} characters"
        ):
            await pool.encode("alice", "x" * (pool.max_characters + 1))
        with pytest.raises(
            InvalidRequest, match=r"chat: prompt is too long: \d+ characters exceed the model's limit"
        ):
            await pool.encode_chat("alice", Conversation((ChatMessage("user", "x" * pool.max_characters),)))


class HeldTokenizer:
    """Makes texts that begin with h stay on their threads until `goes_on` is set. Other texts do not stay."""

    def __init__(self, own: Tokenizer) -> None:
        self.goes_on = threading.Event()
        self.begun: queue.Queue[str] = queue.Queue()
        own.encode = self._encode  # type: ignore[method-assign]

    def _encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        self.begun.put(text[0])
        if text[0] == "h":
            assert self.goes_on.wait(30)
        return (len(text),)


def long_text(letter: str, num_characters: int = MAX_INLINE_CHARACTERS + 1) -> str:
    return letter * num_characters


@pytest.mark.in_order
async def test_c57_one_callers_surplus_is_refused_and_others_go_on(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)
    held = HeldTokenizer(own)
    num_allowed = NUM_THREADS - 1 + MAX_WAITING

    async with pool_of(own) as pool:
        waiting = [asyncio.create_task(pool.encode("alice", long_text("h"))) for _ in range(num_allowed + 5)]
        while not any(task.done() for task in waiting):
            await asyncio.sleep(0)
        refused = [task for task in waiting if task.done()]
        assert refused == waiting[-5:]
        for task in refused:
            with pytest.raises(Overloaded, match=f"{MAX_WAITING} texts wait, which is the limit") as caught:
                await task
            assert caught.value.retry_after_s > 0
        assert await pool.encode("bob", long_text("b")) == (MAX_INLINE_CHARACTERS + 1,)
        assert await pool.encode_chat("bob", Conversation((ChatMessage("user", "b" * 3000),)))
        with pytest.raises(Overloaded):
            await pool.encode("alice", long_text("h"))
        waiting[-6].cancel()  # a cancelled call makes room
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(pool.encode("alice", long_text("h"))))
        held.goes_on.set()
        left = [task for task in waiting if task not in refused and not task.cancelled()]
        await asyncio.gather(*left[:-6], *left[-5:])


async def test_c57_callers_take_turns_by_the_characters_of_their_texts(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)
    held = HeldTokenizer(own)

    async with pool_of(own) as pool:
        holders = [  # so that one thread is left
            asyncio.create_task(pool.encode(f"holder {number % 2}", long_text("h")))
            for number in range(NUM_THREADS - 1)
        ]
        await asyncio.sleep(0)
        texts = ["A" * 9_000] * 3 + ["b" * 3_000] * 6 + ["c" * 3_000] * 2
        await asyncio.gather(*[pool.encode(text[0], text) for text in texts])
        held.goes_on.set()
        await asyncio.gather(*holders)
    assert "".join(held.begun.queue).replace("h", "") == "AbcbcbAbbbA"


async def test_c57_a_cancelled_text_keeps_its_thread_until_it_ends(tmp_path: Path) -> None:
    """Otherwise, one caller could keep any number of threads busy by leaving again and again."""
    own = tokenizer(tmp_path)
    held = HeldTokenizer(own)

    async with pool_of(own) as pool:
        for _ in range(2):
            calls = [asyncio.create_task(pool.encode("alice", long_text("h"))) for _ in range(NUM_THREADS)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert await pool.encode("bob", long_text("b"))
        held.goes_on.set()
        assert await pool.encode("alice", long_text("a"))
    assert "".join(held.begun.queue) == "h" * (NUM_THREADS - 1) + "ba"


async def test_a_thread_that_does_not_start_costs_its_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(tokenizer(tmp_path)) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            for _ in range(NUM_THREADS):
                with pytest.raises(
                    Overloaded, match="cannot start a thread for texts: can't start new thread"
                ):
                    await pool.encode("alice", long_text("a"))
        async with asyncio.timeout(60):
            assert await pool.encode("alice", long_text("a"))


async def test_the_event_loop_goes_on_while_long_prompts_are_tokenized(tmp_path: Path) -> None:
    """With a lock that is held throughout, the loop would stand still for as long as one text takes."""
    own = tokenizer(tmp_path)
    text = "The cache is the baton. " * 8000

    def one_text() -> float:
        began = time.perf_counter()
        own.encode(text)
        return time.perf_counter() - began

    pool = TokenizerPool(own, 10**6, MAX_WAITING)
    num_turns, working = 0, asyncio.gather(*[pool.encode("alice", text) for _ in range(4)])
    while not working.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    pool.close()
    took_s = one_text()
    assert num_turns > 10, f"{num_turns} turns of the loop beside 4 texts, each of {took_s:.3f} s"


def test_c57_every_text_of_a_conversation_counts_for_its_callers_turn() -> None:
    call = ToolCall("c", "f", "x" * 16)
    turn = ChatMessage("assistant", "x", reasoning="x" * 2, name="x" * 4, tool_calls=(call, call))
    assert Conversation((turn, ChatMessage("user", "x" * 64))).num_characters == 1 + 2 + 4 + 2 * 16 + 64


async def test_a_conversation_is_rendered_and_its_special_tokens_stand_once(tmp_path: Path) -> None:
    own = tokenizer(tmp_path)

    async with pool_of(own) as pool:
        token_ids = await pool.encode_chat("alice", HELLO)
        text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert await pool.decode("alice", token_ids, skip_special_tokens=False) == text
        shorter = await pool.encode_chat("alice", HELLO, add_generation_prompt=False)
        assert token_ids[: len(shorter)] == shorter
        assert len(shorter) < len(token_ids)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "no chat template; send text or token ids"),
        ("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate"),
        ("{{ messages[0].content.nothing.at.all }}", "refused the conversation: "),
        ("{{ 1 / 0 }}", "refused the conversation: "),
        ("{{ ''.__class__.__mro__ }}", "refused the conversation: "),
        ("{% for", "refused the conversation: "),
    ],
)
async def test_a_template_that_fails_is_reported_to_the_client(
    tmp_path: Path, template: str | None, complaint: str
) -> None:
    own = tokenizer(tmp_path, template or "")
    if template is None:
        (tmp_path / "chat_template.jinja").unlink()
        own = Tokenizer(tmp_path)

    async with pool_of(own) as pool:
        with pytest.raises(InvalidRequest, match=f"^chat: .*{complaint}"):
            await pool.encode_chat("alice", HELLO)


async def test_a_template_that_does_not_end_is_ended_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "TEMPLATE_TIMEOUT_S", 0.2)
    own = tokenizer(tmp_path, "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}fine")

    async with pool_of(own) as pool:
        loops = [pool.encode_chat("alice", Conversation((ChatMessage("user", "loop"),))) for _ in range(4)]
        errors = await asyncio.wait_for(asyncio.gather(*loops, return_exceptions=True), 30)
        assert {str(error) for error in errors} == {"chat: the model's chat template took longer than 0.2 s"}
        assert await pool.encode_chat("alice", HELLO) == own.encode("fine")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",  # CVE-2025-27516
        "{% include '/etc/hostname' %}",
        "{{ messages.append(1) }}",
    ],
)
async def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, template: str) -> None:
    """A stranger may have written the template."""
    async with pool_of(tokenizer(tmp_path, template)) as pool:
        with pytest.raises(InvalidRequest, match="chat template refused the conversation"):
            await pool.encode_chat("alice", HELLO)


def test_work_that_ends_in_time_is_left_alone() -> None:
    assert run_within(0.05, lambda: 7) == 7
    time.sleep(0.1)  # the interruption would arrive here
    with pytest.raises(ZeroDivisionError):
        run_within(0.05, lambda: 1 // 0)
    run_within(60.0, lambda: 1)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "none runs on"
