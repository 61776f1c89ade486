"""Schemathesis, as anybody would run it, against the description that a gateway gives of its HTTP API."""

import asyncio
import os
import sys

ENDLESS = "/cluster/events"
"""A stream that ends with its client."""

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
"""Not `positive_data_acceptance`: a schema cannot say that two fields contradict each other, or what the model has."""


async def schemathesis(http_port: int | None, phases: str, examples: int, seed: int) -> tuple[int, str]:
    """Its exit code and what it prints.

    Of its phases, `fuzzing` draws `examples` requests to each route, `coverage` tries the bounds of every field.
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
