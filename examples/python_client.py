"""Asks a question through Baton's Python client, and prints the answer as it comes.

    python examples/python_client.py [--target 127.0.0.1:50051 ...] [--tls-ca ca.pem] [QUESTION]

Name every gateway of the fleet. BATON_API_KEY contains the API key, if the gateways require one. If the gateways use
TLS, --tls-ca names the file of the CA that signed their certificates.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from examples.baton_client import TLS, BatonClient, BatonError


async def ask(targets: list[str], tls: TLS | None, question: str) -> None:
    async with BatonClient(*targets, api_key=os.environ.get("BATON_API_KEY"), tls=tls) as client:
        model = await client.model_info()
        print(f"{model.name}: ", end="")
        async for part in client.generate(messages=[("user", question)], max_tokens=64, timeout_s=60.0):
            print(part.text, end="", flush=True)
            if part.finish is not None:
                print(f"\n{part.finish.completion_tokens} tokens in {part.finish.total_s:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", metavar="HOST:PORT")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE")
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    options = parser.parse_args()
    tls = TLS(authorities=options.tls_ca.read_bytes()) if options.tls_ca else None
    try:
        asyncio.run(ask(options.target or ["127.0.0.1:50051"], tls, options.question))
    except BatonError as error:
        print(f"python_client: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
