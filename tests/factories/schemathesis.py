"""Schemathesis, as any user would run it, against the description that a gateway gives of its HTTP API."""

import asyncio
import os
import sys

ENDLESS = "/cluster/events"
"""A path whose stream ends only when its client closes it."""

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
)
"""`positive_data_acceptance` is not among them: a schema cannot say that two fields contradict each other, or
which model is served."""


async def schemathesis(http_port: int | None, phases: str, examples: int, seed: int) -> tuple[int, str]:
    """Runs schemathesis; returns its exit code and its output.

    The phase `fuzzing` sends `examples` requests to each route. The phase `coverage` tries the bounds of
    every field.
    """
    options = {
        "--phases": phases,
        "--max-examples": str(examples),
        "--seed": str(seed),
        "--checks": ",".join(CHECKS),
        "--exclude-path": ENDLESS,
        "--suppress-health-check": "all",
        "--request-timeout": "20",
    }
    command = [sys.executable, "-m", "schemathesis.cli", "run", "--no-color"]
    run = await asyncio.create_subprocess_exec(
        *command,
        *(word for option in options.items() for word in option),
        f"http://127.0.0.1:{http_port}/openapi.json",
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.factories.schemathesis_hooks"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await run.communicate()
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()
    assert run.returncode is not None
    return run.returncode, output.decode()
