"""The servers that the gateway's benchmark measures.

Each server is a process of its own, so that its CPU time can be measured.

    python -m benchmarks.gateway_side gateway MODEL ENDPOINT_JSON     a real gateway with one worker
    python -m benchmarks.gateway_side bare TOKENS_PER_S               gRPC alone, with the same messages

Prints its ports as JSON, and ends when its stdin ends.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from baton.clock import SystemClock
from baton.config import GatewayConfig
from baton.system.curve import derive_keys
from baton.system.garbage import settle
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from benchmarks.gateway_engine import FIRST_WORD, NETWORK, NUM_WORDS, SHORTEST_STEP_S
from gateway import Gateway, ServedModel, Tokenizer
from worker.ready_line import endpoint_from_json


async def run_gateway(folder: Path, endpoint: str) -> None:
    tokenizer = Tokenizer(folder)
    model = ServedModel("benchmark", str(folder), 8192, tokenizer.vocab_size, (), "float32", "float32")
    config = GatewayConfig(grpc_port=0, http_port=0, routing_mode="local", max_in_flight=4096)
    prefix_key = derive_keys(None).prefix
    gateway = Gateway(config, NETWORK, None, prefix_key, "retry", model, tokenizer, SystemClock())
    settle()  # as `baton gateway` does
    await gateway.start()
    worker = endpoint_from_json(endpoint)
    gateway.workers.add_worker(worker)
    await gateway.workers.wait_for_worker(worker.ref.name)
    print(json.dumps({"grpc": gateway.grpc_port, "http": gateway.http_port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await gateway.stop(0.0)


class Bare(pb_grpc.GenerationServiceServicer):
    """Sends the messages that a gateway would send, at the engine's pace, without any worker."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._num_running = 0

    async def Generate(  # noqa: N802
        self,
        request: pb.GenerateRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.GenerateResponse]:
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        self._num_running += 1
        try:
            for position in range(request.sampling_params.max_tokens):
                word = FIRST_WORD + position % NUM_WORDS
                yield pb.GenerateResponse(request_id=request.request_id, token_ids=[word], text="word")
                due_at += max(SHORTEST_STEP_S, self._num_running / self._tokens_per_s)
                if (wait_s := due_at - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
        finally:
            self._num_running -= 1


async def run_bare(tokens_per_s: float) -> None:
    server = grpc.aio.server()
    bare = Bare(tokens_per_s)  # type: ignore[abstract] # only one of its calls is made
    pb_grpc.add_GenerationServiceServicer_to_server(bare, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"grpc": port, "http": None}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)


if __name__ == "__main__":
    if sys.argv[1] == "gateway":
        asyncio.run(run_gateway(Path(sys.argv[2]), sys.argv[3]))
    else:
        asyncio.run(run_bare(float(sys.argv[2])))
