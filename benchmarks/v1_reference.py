"""The V1 scheduler of vLLM as a `Side`, without a device or a model. Knows nothing of Baton's scheduler.

    PYTHON -m benchmarks.v1_reference

This process runs timed rounds and plays workloads when it gets orders on standard input; see
`benchmarks/peer.py`. PYTHON is an interpreter with vllm 0.13.0.

    {"play": WORKLOAD, "num_ahead": 0}
    {"steps": ["r0:16@0", ...], "blocks": [...], "is_misled": false, "is_forgetful": false}
"""

# mypy: disable-error-code="import-not-found"
# vLLM is installed elsewhere, since it requires a particular version of torch. All its values have the type
# `Any`.

import copy
import functools
import json
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.peer import Order, serve
from benchmarks.scheduler_play import Decisions, Ended, Share, play
from benchmarks.scheduler_rounds import run_round
from benchmarks.scheduler_workloads import EOS, RequestSpec, Settings, Workload

VERSION = "0.13.0"

SMALLEST_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1_000,
    "max_position_embeddings": 131_072,
}
"""The scheduler reads only the context length from a model. The settings contain that length."""


class V1Side:
    """One scheduler.

    With `is_async` it is vLLM's AsyncScheduler, which may plan one step ahead of the model.
    """

    def __init__(self, settings: Settings, *, is_async: bool = False) -> None:
        config = _make_config(settings)
        self._has_drafts = settings.num_speculative_tokens > 0
        self._scheduler = (AsyncScheduler if is_async else Scheduler)(
            config,
            KVCacheConfig(settings.num_blocks, [], _groups(settings)),
            StructuredOutputManager(config),
            block_size=settings.block_size,
        )
        self._block_hasher = None
        if settings.enable_prefix_caching:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._block_hasher = get_request_block_hasher(settings.block_size, hash_function)

    @property
    def num_unfinished(self) -> int:
        return len(self._scheduler.requests)

    def watch(self) -> tuple["NeverComputed", "NeverCached"]:
        """Looks out for two flaws of V1 from now on, which costs time."""
        return NeverComputed(self._scheduler), NeverCached(self._scheduler)

    def add(self, spec: RequestSpec, prompt_token_ids: list[int]) -> None:
        params = SamplingParams(
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            stop_token_ids=list(spec.stop_token_ids),
            ignore_eos=spec.ignore_eos,
        )
        self._scheduler.add_request(
            Request(
                spec.request_id,
                prompt_token_ids,
                params,
                pooling_params=None,
                eos_token_id=EOS,
                arrival_time=spec.arrival_time,
                priority=spec.priority,
                cache_salt=spec.cache_salt,
                block_hasher=self._block_hasher,
            )
        )

    def abort(self, request_id: str) -> None:
        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def decisions(self, plan: Any) -> Decisions:
        cached = plan.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        blocks = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        blocks |= {new.req_id: new.block_ids for new in plan.scheduled_new_reqs}
        admitted = {new.req_id for new in plan.scheduled_new_reqs} | cached.resumed_req_ids
        shares = []
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            block_ids = _rows(blocks[request_id] or ())
            is_admitted = request_id in admitted
            drafts = tuple(plan.scheduled_spec_decode_tokens.get(request_id, ()))
            shares.append(Share(request_id, num_tokens, computed[request_id], is_admitted, block_ids, drafts))
        return Decisions(tuple(shares), frozenset(plan.preempted_req_ids))

    def request_ids(self, plan: Any) -> list[str]:
        return list(plan.num_scheduled_tokens)

    def runner_output(self, plan: Any, sampled: dict[str, list[int]], drafts: dict[str, list[int]]) -> Any:
        request_ids = self.request_ids(plan)
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[list(sampled.get(i, ())) for i in request_ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        return output, DraftTokenIds(request_ids, [list(drafts.get(i, ())) for i in request_ids])

    def update(self, plan: Any, runner_output: Any) -> Any:
        """Updates the scheduler as EngineCore does: V1's scheduler gets drafts in a separate call."""
        output, drafts = runner_output
        report = self._scheduler.update_from_output(plan, output)
        if self._has_drafts:
            self._scheduler.update_draft_token_ids(drafts)
        return report

    def ended(self, report: Any) -> tuple[Ended, ...]:
        outputs = [output for news in report.values() for output in news.outputs]
        return tuple(
            Ended(output.request_id, str(output.finish_reason))
            for output in outputs
            if output.finish_reason is not None
        )


class NeverComputed:
    """Blocks that V1 cached in a step that preempted their request, and whether one was found.

    V1 caches a block when it plans to fill it, and keeps the block in the cache when it withdraws the plan.
    So a later request may get KV that was never computed. Baton removes such blocks from the cache.
    """

    def __init__(self, scheduler: Any) -> None:
        self.was_found = False
        self._block_ids: set[int] = set()
        self._kv = scheduler.kv_cache_manager
        self._pool = self._kv.block_pool
        self._preempt, scheduler._preempt_request = scheduler._preempt_request, self._before_preempt
        self._find, self._kv.get_computed_blocks = self._kv.get_computed_blocks, self._after_find
        self._take, self._pool.get_new_blocks = self._pool.get_new_blocks, self._after_take

    def _before_preempt(self, request: Any, timestamp: float) -> None:
        first = request.num_computed_tokens // self._pool.hash_block_size
        for blocks in self._kv.get_blocks(request.request_id).blocks:
            self._block_ids.update(block.block_id for block in blocks[first:] if block.block_hash is not None)
        self._preempt(request, timestamp)

    def _after_find(self, request: Any) -> Any:
        found = self._find(request)
        blocks = chain.from_iterable(found[0].blocks)
        self.was_found |= any(block.block_id in self._block_ids for block in blocks)
        return found

    def _after_take(self, num_blocks: int) -> Any:
        blocks = self._take(num_blocks)
        self._block_ids.difference_update(block.block_id for block in blocks)
        return blocks


class NeverCached:
    """Blocks that V1 computed whole but never cached, and whether a later request could have hit one of them.

    If accepted drafts complete a block, V1 caches the block only when the request's next step is planned. So
    the block is lost if the request ends with those drafts, or is preempted before that step. Baton caches
    the block in both cases.
    """

    def __init__(self, scheduler: Any) -> None:
        self.was_missed = False
        self._hashes: set[Any] = set()
        self._kv = scheduler.kv_cache_manager
        self._block_size = scheduler.block_size
        self._free, self._kv.free = self._kv.free, self._before_free
        self._find, self._kv.get_computed_blocks = self._kv.get_computed_blocks, self._after_find

    def _before_free(self, request: Any) -> None:
        num_full = min(request.num_computed_tokens, request.num_tokens) // self._block_size
        for blocks in self._kv.get_blocks(request.request_id).blocks:
            for block, block_hash in zip(blocks[:num_full], request.block_hashes, strict=False):
                if block.block_hash is None and not block.is_null:
                    self._hashes.add(block_hash)
        self._free(request)

    def _after_find(self, request: Any) -> Any:
        found = self._find(request)
        num_hits = len(found[0].blocks[0])
        may_hit = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
        self.was_missed |= any(block_hash in self._hashes for block_hash in may_hit[num_hits:][:1])
        return found


def _groups(settings: Settings) -> list[KVCacheGroupSpec]:
    """The KV groups. Groups with full attention come first, as V1 requires."""
    shape = {"block_size": settings.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [FullAttentionSpec(**shape) for _ in range(settings.num_full)]
    specs += [
        SlidingWindowSpec(**shape, sliding_window=settings.window) for _ in range(settings.num_windowed)
    ]
    return [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]


def _rows(block_ids: tuple[list[int], ...]) -> tuple[int, ...]:
    """V1's block ids by group, converted to rows as Baton writes them."""
    return tuple(chain.from_iterable(zip(*block_ids, strict=True)))


def _make_config(settings: Settings) -> Any:
    model = copy.copy(_model_config())
    model.max_model_len = settings.max_model_len
    cache = CacheConfig(
        block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching, swap_space=0
    )
    cache.num_gpu_blocks = settings.num_blocks
    scheduler = SchedulerConfig(
        max_model_len=settings.max_model_len,
        is_encoder_decoder=False,
        policy=settings.policy,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_chunked_prefill=settings.enable_chunked_prefill,
    )
    speculation = None
    if num_drafts := settings.num_speculative_tokens:
        speculation = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_drafts,
            prompt_lookup_max=1,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        device_config=DeviceConfig("cpu"),
        speculative_config=speculation,
    )


@functools.cache
def _model_config() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALLEST_MODEL))
        return ModelConfig(folder, skip_tokenizer_init=True, dtype="float32")


def _answer(order: Order) -> Order:
    return _played(order) if "play" in order else run_round(V1Side, order)


def _played(order: Order) -> Order:
    workload, num_ahead = Workload.from_json(order["play"]), order["num_ahead"]
    side = V1Side(workload.settings, is_async=num_ahead > 0)
    never_computed, never_cached = side.watch()
    steps = list(play(side, workload, num_ahead))
    return {
        "steps": [str(step) for step in steps],
        "blocks": [step.blocks for step in steps],
        "is_misled": never_computed.was_found,
        "is_forgetful": never_cached.was_missed,
    }


if __name__ == "__main__":
    assert vllm.__version__ == VERSION, f"this needs vllm {VERSION}, not {vllm.__version__}"
    serve(_answer)
