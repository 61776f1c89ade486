"""Malformed requests to both frontends; `python -m tests.property.api_fuzz --requests 100000` runs long."""

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import grpc.aio

from tests.factories.gateway import GatewayUnderTest, answering, gateway_with
from tests.factories.malformed import good_grpc_message, good_http_request, grpc_call, http_request
from tests.factories.models import make_tokenizer_dir
from tests.factories.schemathesis import schemathesis

ANSWER = [70, 71, 72]
EACH = 50
"""After this many malformed requests, a good one must be answered."""
PROPER = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
TIMEOUT_S = 10.0
OPENAI_KEYS, ANTHROPIC_KEYS = {"message", "type", "param", "code"}, {"message", "type"}
"""Of an error."""


async def fuzz(num_http: int, num_grpc: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Returns how often each status came, and the requests that were not refused as they should be."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        workers = {"w0": answering(ANSWER)}
        async with gateway_with(
            make_tokenizer_dir(Path(folder)), {}, workers, max_message_mib=1
        ) as under_test:
            target = f"127.0.0.1:{under_test.gateway.grpc_port}"
            async with grpc.aio.insecure_channel(target) as channel:
                for index in range(max(num_http, num_grpc)):
                    if index < num_http:
                        data = http_request(rng)
                        answer = await http_answer(under_test, data)
                        seen[answer[:3]] += 1
                        if not answer.startswith("4"):
                            wrong.append(f"{answer} to {data[:300]!r}")
                    if index < num_grpc:
                        method, message = grpc_call(rng)
                        code, details = await grpc_status(channel, method, message)
                        seen[code.name] += 1
                        if code not in PROPER:
                            wrong.append(f"{code} ({details}) to {method} {message[:300]!r}")
                    if index % EACH == 0:
                        await check_good(under_test, channel)
                await check_good(under_test, channel)
    return seen, wrong


async def check_good(under_test: GatewayUnderTest, channel: grpc.aio.Channel) -> None:
    """A good request is answered at each frontend."""
    assert (await http_answer(under_test, good_http_request())).startswith("200")
    good = good_grpc_message().SerializeToString()
    code, details = await grpc_status(channel, "baton.v1.GenerationService/Generate", good)
    assert code is grpc.StatusCode.OK, details


async def http_answer(under_test: GatewayUnderTest, data: bytes) -> str:
    """Sends these bytes on a separate connection. Returns status and body of the answer; checks the shape of an
    error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.http_port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(data)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            lengths = [line for line in head.split("\r\n") if line.startswith("content-length")]
            body = (await reader.readexactly(int(lengths[0].split(":")[1]))).decode()
    except asyncio.IncompleteReadError as error:
        return f"none but {error.partial!r}"
    except TimeoutError:
        return "none in time"
    finally:
        writer.close()
    status = head.split()[1]
    if status != "200":
        details = json.loads(body)["error"]
        keys = OPENAI_KEYS if json.loads(body).keys() == {"error"} else ANTHROPIC_KEYS
        if set(details) != keys or not details["message"]:
            return f"odd {status} {body}"
    return f"{status} {body}"


async def grpc_status(channel: grpc.aio.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    """The status and the message with which a call with these bytes ends."""
    ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{method}")
    call = ask(message, timeout=TIMEOUT_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def follow_description(examples: int, seed: int) -> tuple[int, str]:
    """Runs schemathesis with all its phases, without a time limit."""
    with tempfile.TemporaryDirectory() as folder:
        script = answering(ANSWER)
        gateway = gateway_with(
            make_tokenizer_dir(Path(folder)),
            {"p0": script},
            {"d0": script},
            placement_timeout_s=1.0,
            max_message_mib=64,  # so that no body with one message too many is refused for its size
        )
        async with gateway as under_test:
            port = under_test.gateway.http_port
            return await schemathesis(port, "coverage,fuzzing", examples, seed % 2**32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--examples", type=int, default=0, help="of schemathesis, for each route")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    num_grpc = options.requests // 3
    seen, wrong = asyncio.run(fuzz(options.requests - num_grpc, num_grpc, options.seed))
    print(dict(seen))
    if wrong:
        raise SystemExit("\n".join(wrong))
    if options.examples:
        code, output = asyncio.run(follow_description(options.examples, options.seed))
        print(output)
        raise SystemExit(code)


if __name__ == "__main__":
    main()
