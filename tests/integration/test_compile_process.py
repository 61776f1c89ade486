"""The process that compiles grammars, for real: hostile texts end it or are refused, and the next one is served."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.errors import InvalidRequest
from baton.sampling import GrammarKind, StructuredOutput
from gateway.grammars import CompileProcess, GrammarCheck, process_arguments
from gateway.grammars import check as module
from gateway.model import ServedModel
from tests.factories.hostile_grammars import SHAPES
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer

TOO_COMPLEX = {"alternatives of terminals", "many optional characters"}
"""Of those that nest no deeper than is allowed: the library finds some of them too big, others end the process."""


@asynccontextmanager
async def grammar_check(folder: Path, eos: tuple[int, ...] = (EOS_TOKEN_ID,)) -> AsyncIterator[GrammarCheck]:
    model = ServedModel(
        "tiny", str(folder), 100, make_tokenizer().get_vocab_size(), eos, "float32", "float32"
    )
    grammars = GrammarCheck(partial(CompileProcess, process_arguments(folder, model)), SystemClock(), 64)
    try:
        yield grammars
    finally:
        await grammars.stop()


async def verdict(grammars: GrammarCheck, output: StructuredOutput) -> str:
    try:
        await grammars.check(output, "mallory", None)
    except InvalidRequest as error:
        return str(error)
    return "ok"


def regex(source: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.REGEX, source)


async def test_a_grammar_that_would_keep_much_memory_is_refused_with_the_limit(folder: Path) -> None:
    async with grammar_check(folder) as grammars:
        assert await verdict(grammars, regex("a?" * 4_000)) == "ok"
        reported = await verdict(grammars, regex("a?" * 6_000))
        assert re.search(
            r"the compiled grammar takes \d\d MiB of memory; at most 64 MiB are allowed", reported
        )


async def test_no_hostile_text_keeps_the_next_grammar_from_being_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of depth is off, so that each text really meets the compiler."""
    monkeypatch.setattr(module, "check_depth", lambda _: None)

    async with grammar_check(folder) as grammars:
        for number, (name, shape) in enumerate(SHAPES.items()):
            reported = await verdict(grammars, shape.of())
            assert await verdict(grammars, shape.of()) == reported, "remembered"
            if name in TOO_COMPLEX:
                assert reported != "ok", name
            assert await verdict(grammars, regex(f"yes{number}|no")) == "ok", f"after {name}"


async def test_c13_what_does_not_compile_says_why(folder: Path) -> None:
    async with grammar_check(folder) as grammars:
        assert "invalid regex" in await verdict(grammars, regex("(yes"))
        assert "Invalid type: objekt" in await verdict(
            grammars, StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "objekt"}')
        )


NOTHING = [
    StructuredOutput(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    StructuredOutput(GrammarKind.JSON_SCHEMA, '{"allOf": [{"$ref": "#"}]}'),
    StructuredOutput(GrammarKind.REGEX, r"[^\s\S]"),
    StructuredOutput(GrammarKind.REGEX, r"a[^\s\S]"),
    StructuredOutput(GrammarKind.LARK, 'start: start "a"'),
    StructuredOutput(GrammarKind.LARK, "start: a\na: b\nb: a"),
    StructuredOutput(GrammarKind.REGEX, r"a[^\s\S]" + "b" * 5_000),
]


async def test_a_grammar_that_nothing_can_match_is_refused(folder: Path) -> None:
    async with grammar_check(folder) as grammars:
        for output in NOTHING:
            assert await verdict(grammars, output) == "structured_output: no text can match the grammar"
        for output in (regex("()"), StructuredOutput(GrammarKind.LARK, 'start: ""')):
            assert await verdict(grammars, output) == "ok", "the empty text matches"


async def test_a_model_without_an_end_or_a_tokenizer_file_says_so(folder: Path, tmp_path: Path) -> None:
    async with grammar_check(folder, eos=()) as grammars:
        assert "no end-of-sequence token" in await verdict(grammars, regex("yes"))
    async with grammar_check(tmp_path) as grammars:
        assert "cannot read this model's tokenizer" in await verdict(grammars, regex("yes"))


async def test_more_grammars_than_a_child_compiles_are_served(folder: Path) -> None:
    async with grammar_check(folder) as grammars:
        reported = [await verdict(grammars, regex(f"no{number}")) for number in range(1_050)]
        assert reported == ["ok"] * 1_050


async def test_killed_with_its_fork_it_is_replaced_and_at_the_end_nothing_is_left(folder: Path) -> None:
    async with grammar_check(folder) as grammars:
        await grammars.warm_up()
        assert await verdict(grammars, regex("yes")) == "ok"
        former = grammars._process
        assert former is not None
        assert former._process is not None
        os.kill(former._process.pid, signal.SIGKILL)  # the parent; its fork ends with it
        await former._process.wait()
        while former.is_running:
            await asyncio.sleep(0)
        assert await verdict(grammars, regex("no")) == "ok"
        latest = grammars._process
        assert latest is not None
        assert latest is not former
        assert latest._process is not None
        group = latest._process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
