"""ModelRunner: computes a plan and returns sampled tokens; knows no scheduler, transfer, device or clock."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice, takewhile

import torch

from baton.kv_groups import ONE_GROUP, KVGroups
from baton.request import TokenLogprobs
from baton.step import ChunkLogprobs, ModelRunnerOutput, SchedulerOutput
from engine.batch import RequestBatch, RunnerRequest, SampledRequest
from engine.device import Mark
from engine.drafts import Drafter
from engine.forward import Forward
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache import HostBlocks
from engine.request_table import NONE
from engine.sampler import SampledToken, SampledTokens, Sampler, has_penalties
from engine.step_logits import PendingChunkLogprobs


class ModelRunner:
    """Runs one model over one KV pool. Deterministic: equal plans in equal order give equal tokens.

    Steps are launched in order, and waited for in the same order. On an asynchronous device, the next step
    can be launched while the device still computes this step. The host need not know this step's tokens yet.
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
        takes_forced: bool = False,
        samples: bool = True,
        kv_groups: KVGroups = ONE_GROUP,
        mark: Callable[[], Mark | None] = lambda: None,
    ) -> None:
        """`host_blocks` store the KV of preempted requests. `grammars` makes matchers of structured outputs.

        Without `grammars`, no plan may contain structured outputs. `drafter` guesses the tokens that follow
        the sampled tokens. With `takes_forced`, tokens that a grammar forces are added at once, and no step
        samples them. `samples` is true on one of a worker's ranks; the other ranks receive the tokens of that
        rank. `mark` returns the point in an asynchronous device's queue at which all work launched so far is done.
        """
        self._forward = forward
        self._sampler = sampler
        self._host_blocks = host_blocks
        self._grammars = grammars
        self._drafter = drafter if samples else None
        self._takes_forced = takes_forced
        self._samples = samples
        self._mark = mark
        self._requests = RequestBatch(block_size, kv_groups)
        self._last_step: LaunchedStep | None = None

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Launches a step and waits for it; for benchmarks and tests."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> "LaunchedStep":
        """Runs the model on the plan's tokens, and samples for requests whose known tokens are all computed.

        A plan without tokens still removes finished requests, and swaps blocks. Before the caller has waited for a
        step:

        * The caller may launch at most one further step.
        * The further step must not resume a request of the first step.
        * If either step has drafts, or the further step has forced tokens, the caller must wait first.
        """
        self._wait_before(plan)
        self._requests.update(plan)  # first: finished requests must be removed even if something below fails
        self._host_blocks.swap(plan.swap_out, plan.swap_in)
        step = LaunchedStep(self._requests, self._drafter, takes_forced=self._takes_forced)
        self._start_matching(plan, step)
        if plan.num_scheduled_tokens:
            batch = self._requests.build(plan)
            logits = self._forward(batch)
            step.prompt_logprobs = logits.prompt_logprobs if self._samples else ()
            self._wait_for_tokens_of(batch.sampling_requests)
            if batch.sampling_requests:
                sampled = self._sampler(logits.sampling_RV, batch.sampling_requests)
                step.begin(batch.sampling_requests, sampled, plan.scheduled_spec_decode_tokens)
        if not step.has_samples:  # nothing is sampled, so the step's end is marked here
            step.ends_at(self._mark())
        self._last_step = step
        return step

    def _wait_before(self, plan: SchedulerOutput) -> None:
        """Waits for the previous step if it has drafts, or if this plan has drafts or forced tokens.

        Drafts decide how many tokens the previous step yields. The rank that samples has waited already:
        without the previous step's tokens, the scheduler could not make this plan.
        """
        if self._samples or self._last_step is None:
            return
        if self._last_step.has_drafts or plan.scheduled_spec_decode_tokens or plan.forced_token_ids:
            self._last_step.wait()

    def _wait_for_tokens_of(self, requests: Sequence[SampledRequest]) -> None:
        """Waits for the previous step if sampling for these requests needs to know the tokens of that step.

        Meanwhile the device computes the forward pass.
        """
        if self._last_step is not None and any(needs_known_tokens(request) for request in requests):
            self._last_step.wait()

    def _start_matching(self, plan: SchedulerOutput, step: "LaunchedStep") -> None:
        """Makes the matchers of new requests with structured outputs, and feeds them the output so far."""
        for new in plan.scheduled_new_reqs:
            output = new.sampling_params.structured_output
            if output is not None and self._samples:
                assert self._grammars is not None, "this runner was made without grammars"
                request = self._requests[new.request_id]
                # The matcher is None if the request has ended since the step was planned.
                request.matcher = self._grammars.matcher(output)
                for token_id in new.output_token_ids:
                    step.match(request, token_id)


class LaunchedStep:
    """A step that the device computes, or has computed."""

    def __init__(self, batch: RequestBatch, drafter: Drafter | None, *, takes_forced: bool) -> None:
        self._batch = batch
        self._drafter = drafter
        self._takes_forced = takes_forced
        self._sampling: list[tuple[RunnerRequest, int]] = []
        """Requests that sample, and the index of each request's first sampled token."""
        self._drafts: Mapping[str, tuple[int, ...]] = {}
        self._sampled: SampledTokens | None = None
        self.prompt_logprobs: tuple[PendingChunkLogprobs, ...] = ()
        self._failed: dict[str, str] = {}
        """Requests whose grammar stopped matching in this step."""
        self._worn: dict[str, str] = {}
        """Requests whose compiled grammar reached a limit in this step."""
        self._end: Mark | None = None
        self._output: ModelRunnerOutput | None = None

    @property
    def has_samples(self) -> bool:
        return self._sampled is not None

    @property
    def has_drafts(self) -> bool:
        return bool(self._drafts)

    def begin(
        self,
        requests: Sequence[SampledRequest],
        sampled: SampledTokens,
        drafts: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Sets the requests for which the step samples, row by row, and the `drafts` that it verifies."""
        self._sampling = [
            (request, self._batch.append_unknown(request, row))
            for row, request in enumerate(requests)
            if isinstance(request, RunnerRequest)
        ]
        self._sampled = sampled
        self._drafts = drafts

    def ends_at(self, mark: Mark | None) -> None:
        """Sets the end of a step that samples nothing; None: the step is computed already."""
        self._end = mark

    def wait(self) -> ModelRunnerOutput:
        """Waits for the tokens that the step sampled, and adds them to the requests' tokens.

        When this returns, the step is computed, even if it samples nothing. From then on, blocks that the
        step filled may be read, and blocks that it freed may be written.
        """
        if self._output is None:
            self._output = self._wait_for_output()
        return self._output

    def match(self, request: RunnerRequest, token_id: int) -> None:
        """Advances the request's matcher; if this fails, drops the matcher and marks the request failed or worn."""
        if request.matcher is not None and (error := request.matcher.consume(token_id)):
            ended = self._worn if request.matcher.may_begin_anew else self._failed
            ended[request.request_id] = error
            request.matcher = None

    def _wait_for_output(self) -> ModelRunnerOutput:
        if self._sampled is None:
            if self._end is not None:
                self._end.synchronize()
            return ModelRunnerOutput(
                {},
                failed=self._failed,
                non_finite=self._with_non_finite_prompts(),
                prompt_logprobs=self._prompt_logprobs_by_request(),
            )
        token_ids: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        sampled = self._sampled.wait()
        non_finite = self._with_non_finite_prompts()
        for request, index, token in self._verified(sampled):
            self._batch.set_token(request, index, token.token_id)
            request_id = request.request_id
            if request_id in self._failed or request_id in self._worn or request_id in non_finite:
                continue  # an earlier token contradicts the grammar or means nothing, so no token can follow
            if not token.is_finite:
                non_finite.add(request_id)
                token_ids.pop(request_id, None)
                logprobs.pop(request_id, None)
                continue
            self.match(request, token.token_id)
            if request_id in self._worn or request_id in self._failed:
                continue  # nothing says that the grammar allows this token
            token_ids.setdefault(request_id, []).append(token.token_id)
            if token.logprobs is not None:
                logprobs.setdefault(request_id, []).append(token.logprobs)
        forced = dict(self._forced(token_ids.keys()))
        forced_now = {request_id: each for request_id, each in forced.items() if each}
        drafts = dict(self._draft(token_ids.keys(), forced_now.keys()))
        # A request with an entry, even an empty one, is unforeseeable: its next step may bring drafts or forced tokens.
        return ModelRunnerOutput(
            token_ids,
            logprobs,
            self._failed,
            non_finite,
            draft_token_ids={request_id: each for request_id, each in drafts.items() if each},
            forced_token_ids=forced_now,
            unforeseeable=forced.keys() | drafts.keys(),
            prompt_logprobs=self._prompt_logprobs_by_request(),
            worn=self._worn,
        )

    def _with_non_finite_prompts(self) -> set[str]:
        """Requests whose prompts have logits that are not finite, so that no log-probability means anything."""
        return {each.rows.request_id for each in self.prompt_logprobs if not each.are_finite}

    def _prompt_logprobs_by_request(self) -> dict[str, ChunkLogprobs]:
        return {each.rows.request_id: each.logprobs for each in self.prompt_logprobs}

    def _verified(self, sampled: Sequence[SampledToken]) -> Iterable[tuple[RunnerRequest, int, SampledToken]]:
        """The sampled tokens that count, each with its index among the request's tokens.

        For a request with drafts, the last token that counts is the first one that differs from the draft at
        its position, or that ends the request.
        """
        if not self._drafts:
            return [
                (request, index, token)
                for (request, index), token in zip(self._sampling, sampled, strict=True)
            ]
        return self._verified_with_drafts(iter(sampled))

    def _verified_with_drafts(
        self, rows: Iterator[SampledToken]
    ) -> Iterator[tuple[RunnerRequest, int, SampledToken]]:
        for request, index in self._sampling:
            drafts = self._drafts.get(request.request_id, ())
            first, *others = islice(rows, 1 + len(drafts))
            yield request, index, first
            num_right, last = 0, first.token_id
            for draft, token in zip(drafts, others, strict=True):
                if last != draft or draft in request.stop_token_ids:
                    break
                num_right, last = num_right + 1, token.token_id
                yield request, self._batch.append_unknown(request, NONE), token
            if drafts:
                request.acceptance.verified(len(drafts), num_right)

    def _forced(self, request_ids: Set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tokens that these requests' grammars force next; empty for a request that has a choice.

        Requests that want log-probabilities are left out, since these need computed logits.
        """
        if not self._takes_forced:
            return
        for request, _ in self._sampling:
            if request.matcher is None or request.sampling_params.logprobs is not None:
                continue
            if request.request_id in request_ids and (limit := request.num_tokens_left):
                yield request.request_id, request.matcher.take_forced(limit, request.stop_token_ids)

    def _draft(self, request_ids: Set[str], forced: Set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The drafts of these requests, without the requests that have forced tokens.

        A request has an empty entry if it gets no drafts now, but is expected to get some after the next step.
        """
        if self._drafter is None:
            return
        continuing = request_ids - self._failed.keys() - self._worn.keys()
        requests = [request for request, _ in self._sampling if request.request_id in continuing]
        any_first_token = any(request.num_own_tokens == 1 for request in requests)
        # A step that was launched since may have removed a request.
        requests = [each for each in requests if each.request_id not in forced and each.row is not None]
        for request, drafts in self._drafter.draft(requests, self._batch, any_first_token=any_first_token):
            useful = tuple(_useful(drafts, request))
            # After a request's first token, perhaps nothing was guessed at all. Then a lack of drafts says nothing.
            if useful or not any_first_token:
                request.acceptance.guessed(len(useful))
            if useful or request.acceptance.expects_drafts:
                yield request.request_id, useful


def _useful(drafts: list[int], request: RunnerRequest) -> list[int]:
    """The drafts before the first token that ends the request, or that its grammar does not allow."""
    drafts = list(takewhile(lambda draft: draft not in request.stop_token_ids, drafts))
    if drafts and request.matcher is not None:
        return drafts[: request.matcher.num_valid(drafts)]
    return drafts


def needs_known_tokens(request: SampledRequest) -> bool:
    """Whether sampling needs to know the request's earlier tokens, for a penalty or a grammar."""
    return has_penalties(request.sampling_params) or request.matcher is not None
