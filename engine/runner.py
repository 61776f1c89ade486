"""ModelRunner: a step's plan in, sampled tokens out; knows no scheduler, no transfer and no clock."""

import torch

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.batch import RequestBatch, RequestState
from engine.kv_cache import HostBlocks, KVPool
from engine.layers.paged_attention import PagedAttention
from engine.loader import LoadedModel
from engine.sampler import SampledToken, sample


class ModelRunner:
    """Runs one model over one KV pool. Deterministic: equal plans in equal order give equal tokens."""

    def __init__(self, model: LoadedModel, pool: KVPool, host_blocks: HostBlocks | None = None) -> None:
        """`host_blocks` is where preempted requests' KV goes; without it, no plan may swap."""
        a = model.architecture
        self._decoder = model.decoder
        self._attention = PagedAttention(pool, a.num_heads, a.sliding_windows)
        self._host_blocks = host_blocks or HostBlocks(0, pool)
        self._requests = RequestBatch(pool.shape.block_size, model.device)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the plan's tokens into their blocks and samples for every request that reaches its end.

        The tokens are appended to the requests here too, so the next plan can schedule them. A plan without tokens
        still takes over which requests are gone, and whose KV is to be kept in host memory.
        """
        self._host_blocks.swap(plan.swap_out, plan.swap_in)
        self._requests.update(plan)
        if not plan.num_scheduled_tokens:
            return ModelRunnerOutput({})
        batch = self._requests.build(plan)
        hidden_TE = self._decoder.forward(
            batch.input_ids_T, batch.positions_T, self._attention.prepare(batch)
        )
        if not batch.sampling_requests:
            return ModelRunnerOutput({})
        logits_RV = self._decoder.logits(hidden_TE[batch.sampling_rows_R])
        return _append(batch.sampling_requests, sample(logits_RV, batch.sampling_requests))


def _append(requests: tuple[RequestState, ...], sampled: list[SampledToken]) -> ModelRunnerOutput:
    token_ids, logprobs = {}, {}
    for request, token in zip(requests, sampled, strict=True):
        request.append_token(token.token_id)
        token_ids[request.request_id] = [token.token_id]
        if token.logprobs is not None:
            logprobs[request.request_id] = [token.logprobs]
    return ModelRunnerOutput(token_ids, logprobs)
