"""A model runner driven by hand-written plans: a minimal scheduler, with blocks in shuffled order."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from baton.config import KVCacheDtype, ModelConfig
from baton.request import TokenLogprobs
from baton.sampling import SamplingParams
from baton.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.drafts import Drafter
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel, load_model
from engine.runner_parts import make_runner
from tests.factories.kv_blocks import block_array

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)
NO_DRAFTS: Mapping[str, tuple[int, ...]] = {}


def load_on_cpu(path: Path, *, kv_cache_dtype: str = "auto", **config: str) -> LoadedModel:
    """The model of a folder, in float32 unless `config`, the keys of `model`, says otherwise."""
    values = ModelConfig.model_validate({"dtype": "float32", **config})
    return load_model(values, path, CPU, kv_cache_dtype=cast("KVCacheDtype", kv_cache_dtype))


def make_request_data(
    prompt: Iterable[int] = (1,),
    outputs: Iterable[int] = (),
    params: SamplingParams | None = None,
    *,
    request_id: str = "r",
    stop_token_ids: Iterable[int] = (),
    block_ids: Iterable[int] = (1,),
    num_computed_tokens: int = 0,
) -> NewRequestData:
    """A request as a plan introduces it."""
    return NewRequestData(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(outputs),
        sampling_params=params or SamplingParams(),
        stop_token_ids=frozenset(stop_token_ids),
        block_ids=tuple(block_ids),
        num_computed_tokens=num_computed_tokens,
    )


@dataclass
class DrivenRequest:
    """A request, as the driver tracks it."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_known: bool = False
    is_preempted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)


class StepDriver:
    """A runner, its pool and the requests. Every step names the requests and their token counts."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        seed: int = 0,
        num_spare_blocks: int = 0,
        drafter: Callable[[KVPool], Drafter] | None = None,
    ) -> None:
        """`num_spare_blocks` follow the other blocks in the pool. The drafts of `drafter` use them."""
        self.model = model
        num_in_all = num_blocks + num_spare_blocks
        self.pool = KVPool(num_in_all, model.kv_block_shape(block_size), model.device)
        self.runner = make_runner(model, self.pool, drafter=None if drafter is None else drafter(self.pool))
        self.requests: dict[str, DrivenRequest] = {}
        self.free_blocks = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: SamplingParams = GREEDY,
        stop_token_ids: Iterable[int] = (),
    ) -> DrivenRequest:
        request = DrivenRequest(request_id, tuple(prompt), params, frozenset(stop_token_ids))
        self.requests[request_id] = request
        return request

    def finish(self, request_id: str) -> None:
        """Ends a request. The next plan reports this to the runner."""
        self.free_blocks.extend(self.requests.pop(request_id).block_ids)
        self._finished.add(request_id)

    def preempt(self, request_id: str) -> None:
        """Takes the blocks of a request. The request starts over when it is scheduled next."""
        request = self.requests[request_id]
        self.free_blocks.extend(request.block_ids)
        request.block_ids, request.num_computed, request.is_preempted = [], 0, True
        self._preempted.add(request_id)

    def step(
        self, num_scheduled_tokens: dict[str, int], drafts: Mapping[str, tuple[int, ...]] = NO_DRAFTS
    ) -> ModelRunnerOutput:
        """Runs one plan, and records its outcome.

        `drafts` are computed in addition to the scheduled tokens.
        """
        plan = self.plan({name: n + len(drafts.get(name, ())) for name, n in num_scheduled_tokens.items()})
        output = self.runner.execute(replace(plan, scheduled_spec_decode_tokens=drafts))
        for request_id, n in num_scheduled_tokens.items():
            request = self.requests[request_id]
            sampled = output.sampled_token_ids.get(request_id, [])
            request.num_computed += n + len(sampled[1:])
            request.outputs.extend(sampled)
            request.logprobs.extend(output.logprobs.get(request_id, []))
        return output

    def plan(self, num_scheduled_tokens: dict[str, int]) -> SchedulerOutput:
        new, cached, resumed = [], [], {}
        for request_id, n in num_scheduled_tokens.items():
            request = self.requests[request_id]
            new_blocks = self._grow(request, n)
            if not request.is_known:
                new.append(
                    make_request_data(
                        request.prompt,
                        request.outputs,
                        request.params,
                        request_id=request_id,
                        stop_token_ids=request.stop_token_ids,
                        block_ids=request.block_ids,
                        num_computed_tokens=request.num_computed,
                    )
                )
            else:
                cached.append((request_id, new_blocks, request.num_computed))
                if request.is_preempted:
                    resumed[request_id] = request.num_tokens
            request.is_known, request.is_preempted = True, False
        finished, preempted = frozenset(self._finished), frozenset(self._preempted)
        self._finished.clear()
        self._preempted.clear()
        return SchedulerOutput(
            scheduled_new_reqs=tuple(new),
            scheduled_cached_reqs=CachedRequestData(
                request_ids=tuple(request_id for request_id, _, _ in cached),
                resumed_num_tokens=resumed,
                new_block_ids=tuple(blocks for _, blocks, _ in cached),
                num_computed_tokens=tuple(num_computed for _, _, num_computed in cached),
            ),
            num_scheduled_tokens=dict(num_scheduled_tokens),
            total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
            preempted_req_ids=preempted,
            finished_req_ids=finished,
        )

    def generate(
        self,
        prompts: dict[str, list[int]],
        max_tokens: int,
        *,
        chunk: int = 1000,
        params: SamplingParams = GREEDY,
    ) -> dict[str, list[int]]:
        """Runs all prompts together, in chunks of at most `chunk` tokens, until all tokens are there."""
        requests = [self.add(request_id, prompt, params) for request_id, prompt in prompts.items()]
        while running := [request for request in requests if len(request.outputs) < max_tokens]:
            self.step({r.request_id: min(chunk, r.num_tokens - r.num_computed) for r in running})
        for request in requests:
            self.finish(request.request_id)
        return {request.request_id: request.outputs for request in requests}

    def _grow(self, request: DrivenRequest, n: int) -> tuple[int, ...]:
        num_rows = -(-(request.num_computed + n) // self.pool.shape.block_size)
        needed = num_rows * self.model.layer_groups.groups.num_groups - len(request.block_ids)
        blocks = tuple(self.free_blocks.pop(0) for _ in range(needed))
        request.block_ids.extend(blocks)
        return blocks


def generate_from_copied_blocks(model: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Does what a hand-over does: copies block bytes from one pool into another, and token 0.

    Returns the answer.
    """
    producer, consumer = StepDriver(model, seed=1), StepDriver(model, seed=2)
    sent, received = (driver.add("a", prompt) for driver in (producer, consumer))
    producer.step({"a": len(prompt)})
    received.block_ids = [consumer.free_blocks.pop() for _ in sent.block_ids]
    block_array(consumer.pool)[received.block_ids] = block_array(producer.pool)[sent.block_ids]
    received.num_computed, received.outputs = sent.num_computed, list(sent.outputs)
    while len(received.outputs) < num_tokens:
        consumer.step({"a": 1})
    return received.outputs
