"""ModelRunner: a step's plan in, sampled tokens out; knows no scheduler, no transfer and no clock."""

import torch

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.batch import RequestBatch, RequestState
from engine.grammar import GrammarCompiler
from engine.kv_cache import HostBlocks, KVPool
from engine.layers.paged_attention import PagedAttention
from engine.loader import LoadedModel
from engine.sampler import SampledToken, sample


class ModelRunner:
    """Runs one model over one KV pool. Deterministic: equal plans in equal order give equal tokens."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        host_blocks: HostBlocks | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`host_blocks` is where preempted requests' KV goes, `grammars` has the matchers of structured outputs.

        Without them, no plan may ask for such things.
        """
        a = model.architecture
        self._decoder = model.decoder
        self._attention = PagedAttention(pool, a.num_heads, a.sliding_windows, model.dtype)
        self._host_blocks = host_blocks or HostBlocks(0, pool)
        self._grammars = grammars
        self._requests = RequestBatch(pool.shape.block_size, model.device)
        self._failed: dict[str, str] = {}
        """Requests whose grammar stopped matching in this step."""

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the plan's tokens into their blocks and samples for every request that reaches its end.

        The tokens are appended to the requests here too, so the next plan can schedule them. A plan without tokens
        still takes over which requests are gone, and whose KV is to be kept in host memory.
        """
        self._failed = {}
        self._requests.update(plan)  # first: whatever fails below, nobody who is gone stays known
        self._host_blocks.swap(plan.swap_out, plan.swap_in)
        self._start_matching(plan)
        if not plan.num_scheduled_tokens:
            return ModelRunnerOutput({})
        batch = self._requests.build(plan)
        hidden_TE = self._decoder.forward(
            batch.input_ids_T, batch.positions_T, self._attention.prepare(batch)
        )
        if not batch.sampling_requests:
            return ModelRunnerOutput({}, failed=self._failed)
        logits_RV = self._decoder.logits(hidden_TE[batch.sampling_rows_R])
        return self._append(batch.sampling_requests, sample(logits_RV, batch.sampling_requests))

    def _append(self, requests: tuple[RequestState, ...], sampled: list[SampledToken]) -> ModelRunnerOutput:
        token_ids, logprobs = {}, {}
        for request, token in zip(requests, sampled, strict=True):
            request.append_token(token.token_id)
            self._match(request, token.token_id)
            token_ids[request.request_id] = [token.token_id]
            if token.logprobs is not None:
                logprobs[request.request_id] = [token.logprobs]
        return ModelRunnerOutput(token_ids, logprobs, self._failed)

    def _start_matching(self, plan: SchedulerOutput) -> None:
        """New requests with a structured output get their matchers, which learn what was sampled elsewhere."""
        for new in plan.scheduled_new_reqs:
            output = new.sampling_params.structured_output
            if output is not None:
                assert self._grammars is not None, "this runner was made without grammars"
                request = self._requests[new.request_id]
                request.matcher = self._grammars.matcher(output)
                for token_id in new.output_token_ids:
                    self._match(request, token_id)

    def _match(self, request: RequestState, token_id: int) -> None:
        """Moves the request's matcher on; one that cannot is left behind, and the request fails with this step."""
        if request.matcher is not None and (error := request.matcher.consume(token_id)):
            request.matcher = None
            self._failed[request.request_id] = error
