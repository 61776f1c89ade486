"""/openapi.json is true: schemathesis makes requests from it, and all answers match it."""

import asyncio
from pathlib import Path

from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_tokenizer_dir
from tests.factories.schemathesis import schemathesis

EXAMPLES = 3


async def test_requests_made_from_the_description_get_the_answers_that_it_promises(tmp_path: Path) -> None:
    folder = make_tokenizer_dir(tmp_path)
    script = answering([70, 71])
    async with gateway_with(folder, {"p0": script}, {"d0": script}, placement_timeout_s=1.0) as under_test:
        async with asyncio.timeout(100):
            code, output = await schemathesis(under_test.gateway.http_port, "fuzzing", EXAMPLES, seed=1)
    assert code == 0, output
    assert " passed" in output, output
