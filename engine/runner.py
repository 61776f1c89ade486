"""ModelRunner: a step's plan in, sampled tokens out; knows no scheduler, no transfer, no device and no clock."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol

import torch

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.batch import RequestBatch, RunnerRequest, SampledRequest
from engine.drafts import Drafter
from engine.forward import Forward
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import HostBlocks
from engine.sampler import SampledToken, SampledTokens, Sampler


class Mark(Protocol):
    """A point in a device's queue; a torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Waits until the device has reached it."""
        ...


class ModelRunner:
    """Runs one model over one KV pool. Deterministic: equal plans in equal order give equal tokens.

    Steps are launched in order and may be waited for later, in the same order. On an asynchronous device the next step
    can be launched while this one is computed, although the host does not know its tokens yet.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        host_blocks: HostBlocks,
        block_size: int,
        grammars: GrammarCompiler | None = None,
        *,
        drafter: Drafter | None = None,
        samples: bool = True,
        mark: Callable[[], Mark | None] = lambda: None,
    ) -> None:
        """`host_blocks` hold the KV of preempted requests; `grammars` makes the matchers of structured outputs.

        Without grammars, no plan may contain structured outputs. `drafter` guesses the tokens after those sampled. One
        of a worker's ranks `samples`; the others receive its tokens. `mark` returns the present point in an
        asynchronous device's queue.
        """
        self._forward = forward
        self._sampler = sampler
        self._host_blocks = host_blocks
        self._grammars = grammars
        self._drafter = drafter if samples else None
        self._samples = samples
        self._mark = mark
        self._requests = RequestBatch(block_size)
        self._last_step: LaunchedStep | None = None

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Launches a step and waits for it."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> "LaunchedStep":
        """Computes the plan's tokens into their blocks, and samples for every request whose known tokens are computed.

        A plan without tokens still updates finished requests, and swaps KV to host memory. Until a step has been waited
        for, only one more may be launched, and that one may not resume a request of the first. A step with drafts needs
        every step before it to have been waited for, and the next step needs it.
        """
        self._requests.update(plan)  # first: finished requests must be removed even if something below fails
        self._host_blocks.swap(plan.swap_out, plan.swap_in)
        step = LaunchedStep(self._requests, self._drafter)
        self._start_matching(plan, step)
        if plan.num_scheduled_tokens:
            batch = self._requests.build(plan)
            logits_RV = self._forward(batch)
            self._settle_for(batch.sampling_requests)
            if batch.sampling_requests:
                step.begin(batch.sampling_requests, self._sampler(logits_RV, batch.sampling_requests))
        if not step.samples:  # nothing is sampled, so the step's end is marked here
            step.ends_at(self._mark())
        self._last_step = step
        return step

    def _settle_for(self, requests: Sequence[SampledRequest]) -> None:
        """Waits for the previous step if sampling needs the tokens that it sampled.

        Meanwhile the device computes the forward pass.
        """
        if self._last_step is not None and any(needs_known_tokens(request) for request in requests):
            self._last_step.wait()

    def _start_matching(self, plan: SchedulerOutput, step: "LaunchedStep") -> None:
        """Gives new requests with structured outputs their matchers, and feeds these the output so far."""
        for new in plan.scheduled_new_reqs:
            output = new.sampling_params.structured_output
            if output is not None and self._samples:
                assert self._grammars is not None, "this runner was made without grammars"
                request = self._requests[new.request_id]
                # None: the request has ended since the step was planned
                request.matcher = self._grammars.matcher(output)
                for token_id in new.output_token_ids:
                    step.match(request, token_id)


@dataclass(slots=True)
class _Sampling:
    """What a step samples for one request."""

    request: RunnerRequest
    index: int
    """Of the token that is sampled after the last known one."""
    drafts: tuple[int, ...] = ()

    def verified(self, sampled: Sequence[SampledToken]) -> Sequence[SampledToken]:
        """The tokens that count, of those sampled at `index` and after each draft: up to the first that is not the
        draft, and none after one that ends the request."""
        for num_right, (token, draft) in enumerate(zip(sampled, self.drafts, strict=False)):
            if token.token_id != draft or draft in self.request.stop_token_ids:
                return sampled[: num_right + 1]
        return sampled


class LaunchedStep:
    """A step that the device computes, or has computed."""

    def __init__(self, batch: RequestBatch, drafter: Drafter | None) -> None:
        self._batch = batch
        self._drafter = drafter
        self._sampling: list[_Sampling] = []
        self._sampled: SampledTokens | None = None
        self._failed: dict[str, str] = {}
        """Requests whose grammar stopped matching in this step."""
        self._end: Mark | None = None
        self._output: ModelRunnerOutput | None = None

    @property
    def samples(self) -> bool:
        return self._sampled is not None

    def begin(self, requests: Sequence[SampledRequest], sampled: SampledTokens) -> None:
        """Sets the requests that the step samples for, row by row."""
        for row, request in enumerate(requests):
            if isinstance(request, RunnerRequest):
                self._sampling.append(_Sampling(request, self._batch.append_unknown(request, row)))
            else:
                self._sampling[-1].drafts = request.drafts
        self._sampled = sampled

    def ends_at(self, mark: Mark | None) -> None:
        """Sets the end of a step that samples nothing; None: it is computed already."""
        self._end = mark

    def wait(self) -> ModelRunnerOutput:
        """Waits for what the step sampled, and adds it to the requests' tokens.

        The step is computed when this returns, even if it samples nothing: then its filled blocks may be read, and its
        freed blocks written.
        """
        if self._output is None:
            self._output = self._take()
        return self._output

    def match(self, request: RunnerRequest, token_id: int) -> None:
        """Advances the request's matcher. If that fails, the matcher is dropped and the request fails in this step."""
        if request.matcher is not None and (error := request.matcher.consume(token_id)):
            request.matcher = None
            self._failed[request.request_id] = error

    def _take(self) -> ModelRunnerOutput:
        if self._sampled is None:
            if self._end is not None:
                self._end.synchronize()
            return ModelRunnerOutput({}, failed=self._failed)
        token_ids, logprobs, non_finite = {}, {}, set()
        rows = iter(self._sampled.wait())
        for sampling in self._sampling:
            request = sampling.request
            tokens = sampling.verified(list(islice(rows, 1 + len(sampling.drafts))))
            self._settle(sampling, tokens)
            if request.request_id in self._failed:
                continue  # its earlier output contradicts its grammar, so nothing can follow
            if not all(token.is_finite for token in tokens):
                non_finite.add(request.request_id)
                continue
            for token in tokens:
                self.match(request, token.token_id)
            token_ids[request.request_id] = [token.token_id for token in tokens]
            if asked := [token.logprobs for token in tokens if token.logprobs is not None]:
                logprobs[request.request_id] = asked
        drafts = {} if self._drafter is None else dict(self._draft(self._drafter, token_ids.keys()))
        return ModelRunnerOutput(token_ids, logprobs, self._failed, non_finite, drafts)

    def _settle(self, sampling: _Sampling, tokens: Sequence[SampledToken]) -> None:
        """Adds what was sampled to the request's tokens."""
        request = sampling.request
        self._batch.settle(request, sampling.index, tokens[0].token_id)
        for token in tokens[1:]:
            self._batch.append(request, token.token_id)
        if sampling.drafts:
            request.acceptance.verified(len(sampling.drafts), len(tokens) - 1)

    def _draft(self, drafter: Drafter, request_ids: Set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Guesses for these requests."""
        for sampling in self._sampling:
            request = sampling.request
            if request.request_id in request_ids and request.request_id not in self._failed:
                drafts = drafter.draft(request.token_ids, request.acceptance, len(request_ids))
                if useful := _useful(drafts, request):
                    yield request.request_id, tuple(useful)


def _useful(drafts: list[int], request: RunnerRequest) -> list[int]:
    """Up to a token that ends the request, or that its grammar does not allow."""
    drafts = list(takewhile(lambda draft: draft not in request.stop_token_ids, drafts))
    if drafts and request.matcher is not None:
        return drafts[: request.matcher.num_valid(drafts)]
    return drafts


def needs_known_tokens(request: SampledRequest) -> bool:
    """Whether its next token depends on its earlier tokens other than through the model."""
    p = request.sampling_params
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or request.matcher is not None
    )
