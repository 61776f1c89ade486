"""Workers without an engine that need time: they fill the live page at no cost for a model.

They use the real request plane. The durations of their stages are invented, but what they report is
consistent.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from baton.kv import TransferRole
from baton.request import EngineRequest, FinishReason, RequestOutput, StageTimes
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from baton.worker import KVBlockCounts, KVPeerCounts, RequestCounts
from gateway import Tokenizer
from tests.factories.gateway import Script, ScriptedWorker

NUM_BLOCKS = 240
BLOCK_SIZE = 16
BYTES_PER_TOKEN = 24 * 1024
TRANSPORT = "shared_memory"


@dataclass(frozen=True, slots=True)
class Pace:
    """How long each stage takes, in seconds. Each time differs by up to a third."""

    queue_s: float = 0.004
    prefill_s: float = 0.06
    transfer_s: float = 0.012
    step_s: float = 0.03


@dataclass(slots=True)
class _Counts:
    running: int = 0
    arriving: int = 0
    used: int = 0
    leased: int = 0
    received: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)


class PacedFleet:
    """Scripts for `gateway_with`. Set `workers` from its result. Every answer begins with `answer`."""

    def __init__(self, folder: Path, answer: str, pace: Pace = Pace(), seed: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._token_ids = Tokenizer(folder).encode(answer)
        self._pace = pace
        self._random = Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: dict[str, _Counts] = {}
        self._prefilled: dict[str, asyncio.Event] = {}
        """An event for each request id, for which the decode request waits."""
        self.workers: dict[str, ScriptedWorker] = {}

    def scripts(self, *names: str) -> dict[str, Script]:
        self._counts |= {name: _Counts() for name in names}
        return {name: self._script(name) for name in names}

    def _script(self, name: str) -> Script:
        def script(request: EngineRequest) -> list[RequestOutput]:
            self._loop.call_soon_threadsafe(self._begin, name, request)
            return []

        return script

    def _begin(self, name: str, request: EngineRequest) -> None:
        transfer = request.kv_transfer
        is_producer = transfer is not None and transfer.role is TransferRole.PRODUCER
        answer = self._prefill(name, request) if is_producer else self._decode(name, request)
        task = asyncio.create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prefill(self, name: str, request: EngineRequest) -> None:
        counts, num_blocks = self._counts[name], _blocks(request)
        done = self._prefilled.setdefault(request.request_id, asyncio.Event())
        queue_s, prefill_s = self._about(self._pace.queue_s), self._about(self._pace.prefill_s)
        await asyncio.sleep(queue_s)
        counts.running, counts.used = counts.running + 1, counts.used + num_blocks
        self._tell(name)
        await asyncio.sleep(prefill_s)
        counts.running, counts.used = counts.running - 1, counts.used - num_blocks
        counts.leased += num_blocks
        self._tell(name)
        done.set()
        transfer_s = self._about(self._pace.transfer_s)
        times = StageTimes(
            queue_s=queue_s,
            prefill_s=prefill_s,
            transfers=(self._record(request, queue_s + prefill_s, transfer_s),),
        )
        self._say(name, request, 0, FinishReason.HANDED_OVER, times)
        await asyncio.sleep(transfer_s)
        counts.leased -= num_blocks
        self._tell(name)

    async def _decode(self, name: str, request: EngineRequest) -> None:
        counts, num_blocks = self._counts[name], _blocks(request)
        times = StageTimes()
        counts.arriving, counts.used = counts.arriving + 1, counts.used + num_blocks
        self._tell(name)
        if request.kv_transfer is not None:
            began = self._loop.time()
            await self._prefilled.setdefault(request.request_id, asyncio.Event()).wait()
            del self._prefilled[request.request_id]
            prefilled_s, transfer_s = self._loop.time() - began, self._about(self._pace.transfer_s)
            await asyncio.sleep(transfer_s)
            peer, num_bytes = request.kv_transfer.peer.name, BYTES_PER_TOKEN * len(request.prompt_token_ids)
            counts.received[peer] += 1
            counts.num_bytes[peer] += num_bytes
            times = StageTimes(
                transfer_s=prefilled_s + transfer_s,
                transfer_moving_s=transfer_s + prefilled_s / 3,
                transfer_bytes=num_bytes,
                transport=TRANSPORT,
                transfers=(self._record(request, prefilled_s, transfer_s),),
            )
        counts.arriving, counts.running = counts.arriving - 1, counts.running + 1
        self._tell(name)
        max_tokens = request.sampling_params.max_tokens
        for position in range(len(request.output_token_ids), max_tokens):
            await asyncio.sleep(self._about(self._pace.step_s))
            is_last = position == max_tokens - 1
            self._say(
                name, request, position, FinishReason.LENGTH if is_last else None, times if is_last else None
            )
        counts.running, counts.used = counts.running - 1, counts.used - num_blocks
        self._tell(name)

    def _say(
        self,
        name: str,
        request: EngineRequest,
        position: int,
        finish: FinishReason | None,
        times: StageTimes | None,
    ) -> None:
        token_id = self._token_ids[position % len(self._token_ids)]
        output = RequestOutput(
            request_id=request.request_id,
            first_position=position,
            token_ids=(token_id,),
            finish_reason=finish,
            stage_times=times,
        )
        self.workers[name].say(request, [output])

    def _record(self, request: EngineRequest, prefilled_s: float, transfer_s: float) -> TransferRecord:
        assert request.kv_transfer is not None
        kinds, role = TransferEventKind, request.kv_transfer.role
        first_s, ended_s = prefilled_s * 2 / 3, prefilled_s + transfer_s
        if role is TransferRole.PRODUCER:
            moments = [
                (kinds.FIRST_PIECE, first_s),
                (kinds.PREFILLED, prefilled_s),
                (kinds.RELEASED, ended_s),
            ]
        else:
            moments = [(kinds.ASKED, 0.001), (kinds.FIRST_PIECE, first_s), (kinds.VERIFIED, ended_s)]
        return TransferRecord(
            role=role,
            peer=request.kv_transfer.peer.name,
            attempt=0,
            transport=TRANSPORT,
            num_bytes=BYTES_PER_TOKEN * len(request.prompt_token_ids),
            events=tuple(TransferEvent(kind, at_s) for kind, at_s in moments),
        )

    def _tell(self, name: str) -> None:
        """Reports the counts with the worker's next heartbeat."""
        worker, counts = self.workers[name], self._counts[name]
        used = min(counts.used, NUM_BLOCKS - counts.leased)
        worker.blocks = KVBlockCounts(NUM_BLOCKS, NUM_BLOCKS - used - counts.leased, counts.leased, 0)
        worker.requests = RequestCounts(counts.running, 0, counts.arriving)
        worker.kv_peers = tuple(
            KVPeerCounts(
                TransferRole.CONSUMER, peer, TRANSPORT, done, 0, 0, counts.num_bytes[peer], 0.0, 0.0, 0.0
            )
            for peer, done in counts.received.items()
        )

    def _about(self, seconds: float) -> float:
        return seconds * self._random.uniform(2 / 3, 4 / 3)


def _blocks(request: EngineRequest) -> int:
    num_tokens = len(request.prompt_token_ids) + request.sampling_params.max_tokens
    return -(-num_tokens // BLOCK_SIZE)
