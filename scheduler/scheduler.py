"""Scheduler: decides which requests compute how many tokens in a step, in which blocks; knows no device.

Prefill and decode are not separate phases. Each step divides a budget of tokens among the requests, until
each one's `num_computed_tokens` reaches its `num_tokens`. The parts, by file:

    batching    how a step is filled              order       which request runs, or is preempted, first
    running     requests that compute             preemption  what happens to the KV of a victim
    admission   requests that wait                remote      prompts received from, or sent to, other workers
    kv_cache    blocks and prefixes               swap        host memory
    ending      requests that end                 trial       the search for the request that breaks its steps
    speculation drafts of the next tokens, and tokens that a grammar forces
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from baton.config import SchedulerConfig
from baton.errors import InvalidRequest
from baton.kv_groups import ONE_GROUP, KVGroups
from baton.request import ErrorKind, RequestOutput, TokenLogprobs
from baton.sampling import StructuredOutput
from baton.step import NON_FINITE, ClientOutputs, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from baton.worker import KVBlockCounts, RequestCounts
from scheduler.admission import Admission
from scheduler.batching import make_batching
from scheduler.ending import Ending
from scheduler.kv_cache import KVCache
from scheduler.limits import ContextLimits, check_stop
from scheduler.load import WaitingLoad, waiting_load
from scheduler.order import make_order
from scheduler.preemption import Preemption
from scheduler.queue import WaitingQueue
from scheduler.remote import KVConnector, RemotePrompts
from scheduler.request import Request, RequestStatus
from scheduler.running import Running
from scheduler.speculation import Speculation
from scheduler.step import StepPlan
from scheduler.swap import SwapSpace
from scheduler.trial import Trial, num_computed_after


class Scheduler:
    """Schedules the requests and blocks of one device, as vLLM V1 does.

    With `config.async_scheduling`, `schedule()` may be called before the output of the last step is known. A
    token in flight then has a position, but no id yet; see also `awaits_output`. If each `schedule()` is
    followed by its `update_from_output()`, the steps are the same with and without async scheduling.

    `config` must have `num_blocks` and `max_model_len`, and `num_swap_blocks` if `preemption` is `swap`. `hash_key`
    (16 to 64 bytes) makes block hashes comparable between processes that share it; by default it is random.
    `mixes_prompt_parts`: a step may compute part of a long prompt beside prompts that it completes (on a GPU, this
    hardly makes it longer). `num_speculative_tokens`: the most drafts per request and step. `kv_groups`: the model's.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        connector: KVConnector | None = None,
        hash_key: bytes | None = None,
        *,
        mixes_prompt_parts: bool = False,
        num_speculative_tokens: int = 0,
        kv_groups: KVGroups = ONE_GROUP,
    ) -> None:
        self._config = config
        self._limits = ContextLimits(config, kv_groups)
        self._connector = connector
        assert config.num_blocks is not None, "see ContextLimits"
        self._counters = counters = Counter[str]()
        caches, size = config.enable_prefix_caching, config.block_size
        self._kv = kv = KVCache(config.num_blocks, size, caches, hash_key, kv_groups)
        self.kv_events = kv.events
        """Changes of the prefix cache; for one reader."""
        assert config.num_swap_blocks or config.preemption == "recompute", "a worker sets the swap space"
        self._swap = swap = SwapSpace(config.num_swap_blocks or 0)
        self._remote = RemotePrompts(connector, kv, counters)
        self._trial = Trial()
        waiting, order = WaitingQueue(), make_order(config)
        self._order = order
        self._preemption = Preemption(order, waiting, kv, swap, counters)
        self._speculation = Speculation(num_speculative_tokens, self._limits)
        self._running = Running(
            config, order, kv, self._preemption, self._speculation, mixes_prompt_parts=mixes_prompt_parts
        )
        self._admission = Admission(
            config, order, waiting, self._running, kv, self._remote, swap, counters, self._trial
        )
        self._batching = make_batching(config, self._running, self._admission, kv)
        self._requests: dict[str, Request] = {}
        self._ending = Ending(
            self._requests, self._admission, self._running, self._remote, swap, self._preemption, counters
        )
        self._num_steps = 0
        self._under_way: dict[int, list[Request]] = {}
        """By step number: the requests of each step whose output is not known yet."""
        self._preempted_between_steps: set[str] = set()

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest if its id is in use or this engine could never run it.

        The caller has checked that the request's tokens are in the model's vocabulary.
        """
        self._limits.apply(request)
        if request.request_id in self._requests or self._kv.is_held(request.request_id):
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use")
        self._kv.tokens_arrived(request)
        self._requests[request.request_id] = request
        self._speculation.begin(request)
        self._remote.announce(request)
        self._admission.add(request)

    def schedule(self) -> SchedulerOutput:
        """Plans the next step, which may be empty. After this call, the step's tokens count as computed."""
        self._num_steps += 1
        self._swap.begin_step()
        step = StepPlan(self._num_steps, self._config.max_num_batched_tokens)
        step.forced_token_ids = self._speculation.take_forced(self._requests)
        self._batching.fill(step)
        self._order.planned(self._config.max_num_batched_tokens - step.token_budget)
        plan = step.finish(self._preempted_between_steps, self._ending.ended_since_plan)
        self._preempted_between_steps, self._ending.ended_since_plan = set(), set()
        self._advance(step)
        if self._connector is None:
            return plan
        return replace(plan, kv_connector_metadata=self._connector.build_connector_meta(plan))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> ClientOutputs:
        """Processes a step's samples. Returns the outputs by client, including those of finished requests."""
        outputs = ClientOutputs()
        sampled, logprobs = model_runner_output.sampled_token_ids, model_runner_output.logprobs
        forced, preempted_status = model_runner_output.forced_token_ids, RequestStatus.PREEMPTED
        requests = self._under_way.pop(scheduler_output.step, [])
        self._speculation.count_drafts(requests, scheduler_output.scheduled_spec_decode_tokens, sampled)
        if prompt_logprobs := model_runner_output.prompt_logprobs:
            for request in (each for each in requests if each.request_id in prompt_logprobs):
                request.add_prompt_logprobs(prompt_logprobs[request.request_id])
        for request in requests:
            request_id = request.request_id
            token_ids = sampled.get(request_id)
            if not token_ids or request.is_finished:
                continue  # not all of its known tokens are computed, or it failed, or it has ended
            if request.num_output_placeholders:
                request.num_output_placeholders -= 1
            if request.status is preempted_status and self._must_sample_again(request):
                continue
            its_logprobs = logprobs.get(request_id) if logprobs else None
            if forced and (its_forced := forced.get(request_id)):
                num_taken = self._take_tokens(request, [*token_ids, *its_forced], its_logprobs, outputs)
                self._speculation.append_forced(request, its_forced, num_taken - len(token_ids))
            else:
                self._take_tokens(request, token_ids, its_logprobs, outputs)
        self._speculation.propose(requests, model_runner_output)
        if failed := model_runner_output.failed:
            self._ending.fail(requests, failed, ErrorKind.INVALID_REQUEST, outputs)
        if non_finite := dict.fromkeys(model_runner_output.non_finite, NON_FINITE):
            self._kv.forget_prefixes()  # blocks of earlier steps may be wrong, too
            self._ending.fail(requests, non_finite, ErrorKind.STEP_FAILED, outputs)
        if self._preemption.given_back:
            self._ending.end_given_back(outputs)
        self._ending.drop_from_running()
        if self.is_trying:
            self._advance_trial(scheduler_output)
        return outputs

    def retry_in_halves(
        self, failed: SchedulerOutput, later: Iterable[SchedulerOutput], reason: str
    ) -> ClientOutputs:
        """Discards a step that the device failed to compute, and the `later` steps, planned on top of it.

        The failed step's requests compute all their tokens again, one half after the other; all others wait.
        A request that fails alone ends with STEP_FAILED. Requests that load only the rest of their prompt, after
        prefix-cache hits, are given back, since the blocks of these hits may never have been computed.
        """
        outputs = ClientOutputs()
        self._under_way.clear()
        for request in self._requests.values():
            request.num_output_placeholders = 0
        status, error = RequestStatus.FINISHED_GIVEN_BACK, "a step failed on this worker"
        self._ending.finish(self._remote.loaded_behind_hits(), status, outputs, error)
        self._ending.end_given_back(outputs)
        self.reset_prefix_cache(force=True)
        self._ending.ended_since_plan |= self._preemption.begin_anew(self._requests.values())
        self._ending.ended_since_plan.update(*(plan.finished_req_ids for plan in (failed, *later)))
        num_computed = num_computed_after(failed)
        unfinished = {each: num_computed[each] for each in num_computed if each in self._requests}
        was_alone = len(failed.num_scheduled_tokens) == 1
        culprit = self._trial.step_failed(unfinished, self._num_steps + 1, was_alone=was_alone)
        if culprit is not None:
            status, kind = RequestStatus.FINISHED_ERROR, ErrorKind.STEP_FAILED
            self._ending.finish(
                [culprit], status, outputs, f"a step that computed only this request failed: {reason}", kind
            )
        return outputs

    @property
    def awaits_output(self) -> bool:
        """Whether the next plan should wait for the output of the current steps; see Speculation."""
        return self._speculation.awaits_output(self._under_way)

    @property
    def is_trying(self) -> bool:
        """Whether a trial is under way. If so, steps must continue, even after a step without anything to compute."""
        return self._trial.group is not None

    @property
    def has_computed_in_trial(self) -> bool:
        """Whether the device has computed a request since the failed step that began the last trial."""
        return self._trial.has_passed

    def wanted_grammars(self) -> frozenset[StructuredOutput]:
        """Grammars that requests wait for."""
        return self._admission.wanted_grammars()

    def grammars_in_use(self) -> frozenset[StructuredOutput]:
        """Grammars of all unfinished requests. Looks at every request."""
        outputs = (request.sampling_params.structured_output for request in self._requests.values())
        return frozenset(filter(None, outputs))

    def grammar_compiled(self, output: StructuredOutput, error: str | None = None) -> ClientOutputs:
        """Queues requests that wait for this grammar, at their old places. An `error` ends them instead."""
        outputs = ClientOutputs()
        for request in self._admission.take_compiled(output):
            if error is None:
                request.move_to(RequestStatus.WAITING)
                self._admission.push(request)
            else:
                self._ending.end(
                    request, RequestStatus.FINISHED_ERROR, outputs, error, ErrorKind.INVALID_REQUEST
                )
        return outputs

    def update_connector_output(self, output: KVConnectorOutput) -> ClientOutputs:
        """Processes the connector's output. Call it before `schedule()`. Late and unknown entries affect no request."""
        outputs = ClientOutputs()
        if self._connector is not None:
            self._connector.update_connector_output(output)
        for received in output.finished_recving:
            if request := self._remote.receive(received):
                first = received.first_token
                logprobs = [first.logprobs] if first.logprobs else None
                self._take_tokens(request, [first.token_id], logprobs, outputs)
        returning: list[Request] = []
        for failure in output.failed_recving:
            if request := self._remote.fail(failure):
                if failure.is_postponed:
                    self._admission.push(request)
                elif failure.is_unneeded:
                    self._ending.end(request, RequestStatus.FINISHED_ABORTED, outputs, failure.reason)
                elif request.must_report_failure:
                    status, kind = RequestStatus.FINISHED_ERROR, ErrorKind.KV_LOAD_FAILED
                    self._ending.end(request, status, outputs, failure.reason, kind)
                else:
                    returning.append(request)
        for request in sorted(returning, key=lambda each: each.queue_key, reverse=True):
            self._admission.add_returning(request)  # each comes before those added earlier
        self._admission.ask_again(output.can_load)
        self._remote.end_holds([*output.finished_sending, *output.quiesced])
        unwanted = [i for i in output.unwanted if i in self._requests and self._requests[i].is_producer]
        self._ending.finish(
            unwanted, RequestStatus.FINISHED_ABORTED, outputs, "no decode worker needs it any more"
        )
        return outputs

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, error: str | None = None
    ) -> ClientOutputs:
        """Ends requests in any state. Ignores unknown and finished requests, so the call may be repeated.

        Samples of current steps are dropped. If a request was given back, its next worker samples them again.
        """
        outputs = ClientOutputs()
        self._ending.finish(request_ids, status, outputs, error)
        return outputs

    @property
    def kv_groups(self) -> KVGroups:
        return self._kv.groups

    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all unfinished requests."""
        return tuple(self._requests)

    @property
    def loading_ids(self) -> tuple[str, ...]:
        """The ids of the requests in WAITING_FOR_REMOTE_KVS."""
        return tuple(self._remote.loading)

    def waiting_ids(self, limit: int) -> tuple[str, ...]:
        """Ids of up to `limit` requests that wait for blocks, budget or a slot; for display to people."""
        return self._admission.first_ids(limit)

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """Empties the prefix cache. If blocks are in use: returns False, or preempts running requests if `force`."""
        if not force and self._kv.num_free != self._kv.num_usable:
            return False
        self._preempted_between_steps |= self._preemption.preempt_all(self._running.requests)
        self._preemption.forget_swapped(self._requests.values())
        self._kv.forget_prefixes()
        return True

    def kv_block_counts(self) -> KVBlockCounts:
        return replace(self._kv.counts(), host_total=self._swap.num_total, host_used=self._swap.num_held)

    def request_counts(self) -> RequestCounts:
        num_received_or_given_back = len(self._remote.received) + len(self._preemption.given_back)
        return RequestCounts(
            running=len(self._running.requests),
            waiting=self._admission.num_waiting + num_received_or_given_back,
            waiting_for_remote_kvs=len(self._remote.loading),
        )

    def waiting_load(self) -> WaitingLoad:
        """The work that waits for this device. Looks at every request, so call it rarely."""
        return waiting_load(self._requests.values())

    def counters(self) -> dict[str, int]:
        """Monotonic counts since the start."""
        return {**self._counters, **self._speculation.counters()}

    def check_integrity(self) -> None:
        """Asserts that queues, requests and blocks are consistent; cheap enough for an idle moment."""
        self._kv.check_integrity()
        self._swap.check_integrity()
        counts = self.request_counts()
        assert counts.total == len(self._requests), f"{counts} but {len(self._requests)} requests are known"
        num_holders = counts.running + counts.waiting_for_remote_kvs + len(self._remote.received)
        assert self._kv.num_tables == num_holders, "a waiting request holds blocks, or a running one none"
        assert all(request.status is RequestStatus.RUNNING for request in self._running.requests)
        assert counts.running <= self._config.max_num_seqs or self._config.batching == "prefill_first"
        num_swapped = sum(len(request.swapped_block_ids) for request in self._requests.values())
        assert num_swapped == self._swap.num_held, "host blocks have lost their requests"

    # schedule()

    def _advance(self, step: StepPlan) -> None:
        """Counts the step's tokens as computed. If async, also reserves the positions of its samples."""
        is_async, num_scheduled = self._config.async_scheduling, step.num_scheduled_tokens
        for request in step.requests:
            request.num_computed_tokens += num_scheduled[request.request_id]
            if is_async:
                num_tokens = len(request.all_token_ids) + request.num_output_placeholders
                # Computed tokens beyond these are drafts.
                request.num_output_placeholders += request.num_computed_tokens >= num_tokens
        if step.requests:
            assert len(num_scheduled) <= self._config.max_num_seqs
            self._under_way[self._num_steps] = step.requests

    # update_from_output()

    def _advance_trial(self, computed: SchedulerOutput) -> None:
        """Preempts all requests when a group's turn ends, so that only those of the next group can break a step."""
        if self._trial.step_computed(computed.step, num_computed_after(computed), self._num_steps + 1):
            self._preempted_between_steps |= self._preemption.preempt_all(self._running.requests)

    def _take_tokens(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        outputs: ClientOutputs,
    ) -> int:
        """Appends tokens up to the first that ends the request. Reports them, and returns their number."""
        all_token_ids, num_taken, status = request.all_token_ids, 0, None
        first_position = len(all_token_ids) - request.num_prompt_tokens
        for token_id in token_ids:
            all_token_ids.append(token_id)
            num_taken += 1
            if token_id in request.stop_token_ids or len(all_token_ids) >= request.max_num_tokens:
                status = check_stop(request, self._limits.max_model_len)
                if status is not None:
                    break
        if len(all_token_ids) >= request.next_hash_at:
            self._kv.tokens_arrived(request)
        taken = token_ids if num_taken == len(token_ids) else token_ids[:num_taken]
        output = RequestOutput(
            request.request_id,
            first_position,
            tuple(taken),
            tuple(logprobs[:num_taken]) if logprobs else None,
        )
        output.num_cached_tokens = request.num_cached_tokens
        if request.prompt_logprobs is not None:
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        if status is None:
            outputs[request.client_id].append(output)
        else:
            self._ending.finish_with(request, status, output, outputs)
        return num_taken

    def _must_sample_again(self, preempted: Request) -> bool:
        """Whether to drop the sample: a preempted producer computes its prompt again, unless it is given back."""
        return preempted.is_producer and preempted.request_id not in self._preemption.given_back
