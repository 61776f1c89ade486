"""Answers of the real model that must match a grammar, through the real gateway and both workers of a hand-over."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.errors import InvalidRequest
from baton.sampling import GrammarKind, StructuredOutput
from gateway.client import GatewayError
from gateway.grammars import CompileProcess, GrammarCheck, process_arguments
from gateway.model import ServedModel
from tests.e2e.test_same_tokens import MODES, make_config
from tests.e2e.tool_calls import DTYPE
from tests.factories.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.slow

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
SHORT = [5, 6, 7]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "population": {"type": "integer", "maximum": 99}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
)
DATE = r"(19|20)\d\d-\d\d-\d\d"


def test_c13_an_answer_matches_its_grammar_and_what_is_no_grammar_is_the_clients_mistake(
    smollm2: Path,
) -> None:
    """This holds in every mode. After a wrong grammar, the next request is served."""

    async def run() -> None:
        async with local_cluster(make_config(dtype=DTYPE), smollm2) as cluster:
            await check_answers_match(cluster)
            for mode in MODES:
                with pytest.raises(GatewayError, match=r"structured_output: .*unclosed group"):
                    await cluster.answer(SHORT, mode, regex="(yes", max_tokens=5)
                with pytest.raises(GatewayError, match=r"min_tokens: must be 0 with"):
                    await cluster.answer(SHORT, mode, regex="yes", min_tokens=3, max_tokens=5)
                good = await cluster.answer(SHORT, mode, regex="(yes|no)", max_tokens=5)
                assert good.text in ("yes", "no")
            await cluster.at_rest()

    asyncio.run(run())


async def check_answers_match(cluster: LocalCluster) -> None:
    options = {"temperature": 0.0, "max_tokens": 60}
    by_schema = await asyncio.gather(
        *[cluster.answer(PROMPT, mode, json_schema=SCHEMA, **options) for mode in MODES]
    )
    assert by_schema[0].token_ids == by_schema[1].token_ids
    assert json.loads(by_schema[0].text)["city"] in ("Paris", "Rome")
    dates = await asyncio.gather(
        *[
            cluster.answer(PROMPT, mode, regex=DATE, temperature=1.5, seed=seed, max_tokens=60)
            for mode in MODES
            for seed in range(4)
        ]
    )
    assert all(re.fullmatch(DATE, date.text) for date in dates)
    assert len({date.text for date in dates}) == 4, "a seed's date is the same in both modes"


def test_what_compiles_quickly_and_cannot_be_matched_is_refused_the_first_time(smollm2: Path) -> None:
    """Its first token alone would take a worker's device seconds, and a gigabyte."""
    source = "zq" * 12 + "(" + "a?" * 20_000 + ")"

    async def run() -> None:
        model = ServedModel("smollm2", str(smollm2), 2048, 49_152, (2,), "float32", "float32")
        grammars = GrammarCheck(partial(CompileProcess, process_arguments(smollm2, model)), SystemClock(), 64)
        try:
            with pytest.raises(InvalidRequest, match="too complex"):
                await grammars.check(StructuredOutput(GrammarKind.REGEX, source), "mallory", None)
            await grammars.check(StructuredOutput(GrammarKind.JSON_SCHEMA, SCHEMA), "alice", None)
        finally:
            await grammars.stop()

    asyncio.run(run())
