"""Short pieces of `python -m tests.e2e.tool_calls` and `python -m tests.e2e.killed_calls`."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.killed_calls import check_kills
from tests.e2e.tool_calls import check_calls
from tests.factories.tool_schemas import tool_schemas

pytestmark = pytest.mark.slow


def test_required_calls_of_a_real_model_fit_their_schemas_streamed_as_whole(smollm2: Path) -> None:
    schemas = [tool_schemas()[number] for number in (6, 40)]

    counts = asyncio.run(check_calls(smollm2, schemas, num_seeds=1, max_tokens=200))

    assert counts["answers"] == len(schemas)


def test_c52_a_call_under_way_survives_the_kill_of_its_worker(smollm2: Path) -> None:
    check_kills(smollm2, 1)
