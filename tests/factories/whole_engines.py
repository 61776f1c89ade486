"""Whole engines over a tiny model, with a real KV plane; a test runs their steps.

Only the gateway is missing.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.kv import OnLoadFailure, WorkerRef
from baton.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from baton.step import ClientOutputs
from engine.executor import start_executor
from engine.grammars.compiler import GrammarCompiler
from scheduler import Scheduler
from tests.factories.hand_overs import both_ends
from tests.factories.security import KEYS
from worker.core import EngineCore
from worker.kv_connector_scheduler import KVConnectorScheduler

PATIENCE_S = 60.0


@dataclass(slots=True)
class Answer:
    """The outputs of an engine for one request: every position once, in order, and nothing after the end."""

    first_position: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: RequestOutput | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    """All outputs, in the order of their arrival."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason of the last output. The request must have ended."""
        assert self.end is not None
        return self.end.finish_reason

    def note(self, output: RequestOutput) -> None:
        if output.finish_reason is None and not output.token_ids:
            return  # the prefill's blocks were released after the hand-over
        assert self.end is None, f"{output} after the end"
        if self.first_position is None:
            self.first_position = output.first_position
        assert output.first_position == self.first_position + len(self.token_ids)
        self.outputs.append(output)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.finish_reason is not None:
            self.end = output


class WholeEngine:
    """All of a worker except its loop, its role and its request plane."""

    def __init__(
        self,
        folder: Path,
        name: str,
        news: threading.Event,
        num_ranks: int = 1,
        speculation: Mapping[str, object] | None = None,
        **scheduler: Any,
    ) -> None:
        settings = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "max_model_len": 256, "num_blocks": 64}
        config = BatonConfig.from_mapping(
            {
                "model": {"dtype": "float32"},
                "engine": {"num_threads": 1},
                "scheduler": settings | scheduler,
                "speculation": dict(speculation or {}),
                "kv_transfer": {"peer_timeout_s": PATIENCE_S},
            }
        )
        incarnation = f"{name}-incarnation"
        self.executor = start_executor(
            config,
            num_ranks,
            KEYS.kv,
            folder,
            incarnation,
            SystemClock(),
            on_kv_output=news.set,
            on_progress=lambda _what, _done, _count: None,
        )
        model, scheduler_config = self.executor.device_engine.model, self.executor.scheduler_config
        self.model = model
        grammars = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids, news.set, SystemClock())
        self.scheduler = Scheduler(
            scheduler_config,
            KVConnectorScheduler(scheduler_config.block_size, model.layer_groups.groups),
            num_speculative_tokens=config.speculation.num_drafts,
            kv_groups=model.layer_groups.groups,
        )
        self.core = EngineCore(
            self.scheduler,
            self.executor.make_pipeline(grammars),
            self.executor.connector,
            grammars,
            model.eos_token_ids,
            SystemClock(),
        )
        self.executor.start()
        self.ref = WorkerRef(name, incarnation, self.executor.kv_addresses, scheduler_config.block_size)
        self.answers: dict[str, Answer] = {}

    def add(self, request: EngineRequest) -> None:
        self.core.add_request(request, "gateway")
        self.answers[request.request_id] = Answer()

    def note(self, outputs: ClientOutputs) -> None:
        for output in (output for news in outputs.values() for output in news):
            self.answers[output.request_id].note(output)

    def take_answers(self) -> dict[str, Answer]:
        """Returns the answers by request; the engine then forgets them."""
        answers, self.answers = self.answers, {}
        return answers

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits, and no block is in use, here or at a peer."""
        blocks = self.core.scheduler.kv_block_counts()
        return not self.scheduler.has_requests() and blocks.free == blocks.total

    def stop(self) -> None:
        self.core.close()
        self.executor.stop()


class EnginesOf:
    """Engines that run steps in turn; a context manager."""

    def __init__(self, folder: Path, patience_s: float = PATIENCE_S) -> None:
        """`patience_s` is the time limit of `run`."""
        self._folder = folder
        self._patience_s = patience_s
        self._news = threading.Event()
        self._engines: list[WholeEngine] = []

    def __enter__(self) -> "EnginesOf":
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.stop()

    def start(
        self,
        name: str,
        num_ranks: int = 1,
        folder: Path | None = None,
        speculation: Mapping[str, object] | None = None,
        *,
        is_interpreted: bool = False,
        **scheduler: Any,
    ) -> WholeEngine:
        """Starts an engine.

        `folder` is that of another model; `speculation` is that section of the configuration. `is_interpreted`: a GPU's
        engine, whose kernels are interpreted.
        """
        with pytest.MonkeyPatch.context() as patch:
            if is_interpreted:
                from tests.factories.interpreted_engine import interpret_kernels  # others need no Triton

                interpret_kernels(patch)
            engine = WholeEngine(
                folder or self._folder, name, self._news, num_ranks, speculation, **scheduler
            )
        self._engines.append(engine)
        return engine

    def step(self) -> None:
        """Runs one step of each engine. If no engine can continue, first waits for a report."""
        self._news.clear()
        may_progress = False
        for engine in self._engines:
            engine.note(engine.core.step())
            may_progress |= engine.core.may_progress
        if not may_progress and not all(engine.is_idle for engine in self._engines):
            assert self._news.wait(PATIENCE_S), "nothing happens any more"

    def run(self) -> None:
        """Runs steps until all engines are idle."""
        end = time.monotonic() + self._patience_s
        while not all(engine.is_idle for engine in self._engines):
            assert time.monotonic() < end, "it does not come to an end"
            self.step()
        for engine in self._engines:
            engine.scheduler.check_integrity()


def hand_over(
    producer: WholeEngine,
    consumer: WholeEngine,
    request: EngineRequest,
    on_failure: OnLoadFailure = OnLoadFailure.REPORT,
) -> None:
    """Adds the prefill request to one engine, and the decode request to the other engine."""
    ends = both_ends(producer.ref, consumer.ref, request.request_id, on_failure)
    for engine, transfer in zip((producer, consumer), ends, strict=True):
        engine.add(replace(request, kv_transfer=transfer))
