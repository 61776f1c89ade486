"""EngineCore: connects scheduler, device, connector and grammars, and advances them by one step at a time.

Knows no thread, no socket and no role; `worker/loop.py` owns the thread it runs on. With asynchronous scheduling, one
step is computed while the next step is planned. The next plan waits for this step if it depends on the step's output,
and, on a CPU, if the step has part of a prompt. Without such waits:

    plan      | step 2 |            | step 3 |            | step 4 |
    device    |  step 1 ............|  step 2 ............|  step 3 ....
    complete                 step 1 |              step 2 |
"""

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain

from baton.clock import Clock
from baton.errors import InvalidRequest
from baton.kv import TransferRole
from baton.request import EngineRequest
from baton.step import (
    NON_FINITE,
    ClientOutputs,
    FailedKV,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from baton.system.progress import Progress
from baton.worker import WorkerLoad
from engine.grammars.compiler import GrammarCompiler
from engine.pipeline import DeviceLostError, Pipeline, StepResult
from kv_transfer import BlockMover, KVConnectorMetadata
from kv_transfer.commands import AbortLoad, BeginLoad
from scheduler import Request, RequestStatus, Scheduler
from worker.device_check import DeviceHealth, fault_of_device
from worker.load import LoadMeter
from worker.stages import StageTimer
from worker.step_counts import PromptTokens, StepCounts
from worker.step_trace_writer import StepTraceWriter

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 16
"""After this many failed steps in a row, the device counts as faulty. One request that breaks its steps adds at most
two to this count. So eight such requests in a row, without a computed step between them, have the same effect."""


@dataclass(slots=True)
class StepUnderWay:
    """A plan whose output is not known yet."""

    plan: SchedulerOutput
    submitted_at: float
    preempted: set[str] = field(default_factory=set)
    """Requests preempted since the plan was made: other requests own the blocks that this step fills for them."""


class EngineCore:
    """One device's work, one step at a time. Every method belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        connector: BlockMover,
        grammars: GrammarCompiler,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        trace: StepTraceWriter | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`progress` watches the engine's thread. Without it, the time of a step is not limited."""
        self.scheduler = scheduler
        """Others may use its counts, KV events and prefix cache between steps. Only this class adds and ends
        requests."""
        self._pipeline = pipeline
        self._connector = connector
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._trace = trace
        self._stages = StageTimer(clock)
        self._under_way: deque[StepUnderWay] = deque()
        self._results: deque[StepResult] = deque()
        """Results of the oldest steps under way, taken early for a device check."""
        self._num_failed_steps = 0
        self.health = DeviceHealth(self._check_device_between_steps, clock)
        """If the device is unfit, this engine must get no further requests."""
        self._meter = LoadMeter()
        self._prompt_tokens = PromptTokens()
        self.progress = progress or Progress("its engine", clock, math.inf)
        """The progress of the engine's thread. `begin` gets the size of a step: the number of tokens to compute."""
        self.steps = StepCounts()
        """Counts all steps; readable from any thread."""
        scheduler.kv_events.ignore()  # events cost nothing before the first `full_listing`
        self.may_progress = False
        """Whether another step could achieve more now. If not, only a command, a deadline, or the end of a
        transfer or of a grammar's compilation changes that."""

    def check_device(self) -> str | None:
        """Computes a known token before the first step. Returns why this failed; None if it succeeded."""
        self.progress.begin()  # without a size, so that the next step still has the limit of a first step
        try:
            return self._check_device_between_steps()
        except DeviceLostError as error:
            return str(error)
        finally:
            self.progress.end()

    def step(self) -> ClientOutputs:
        """Processes ended transfers, plans a step, and processes an earlier step's samples.

        Returns the outputs by client.
        """
        outputs = ClientOutputs()
        self._take_finished(outputs)
        plan = self.scheduler.schedule()
        self._stages.planned(plan)
        if self._trace is not None:
            self._trace.planned(plan, self.scheduler)
        # Before `_submit`, in which a pipeline without a thread of its own computes the step.
        under_way = (plan, *(step.plan for step in self._under_way))
        self.progress.begin(sum(each.total_num_scheduled_tokens for each in under_way))
        self._submit(plan)
        num_kept = self._pipeline.num_ahead(plan)
        is_computing = self.scheduler.is_trying  # requests outside the trial wait for its end
        while len(self._under_way) > num_kept or self.scheduler.awaits_output:
            is_computing |= not self._under_way[0].plan.is_empty
            self._add_with_stages(self._complete_oldest(), outputs)
        has_more = is_computing or self._under_way or self.scheduler.is_trying
        self.may_progress = bool(has_more or plan.kv_connector_metadata is not None)
        return outputs

    def add_request(self, request: EngineRequest, client_id: str) -> None:
        """Queues a request; raises InvalidRequest if this engine could never run it."""
        if not request.prompt_token_ids:
            raise InvalidRequest("prompt", "must not be empty")
        self._check_vocabulary("prompt", request.prompt_token_ids)
        self._check_vocabulary("output_token_ids", request.output_token_ids)
        self.scheduler.add_request(
            Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling_params,
                arrival_time=self._clock.now(),
                priority=request.priority,
                eos_token_ids=self._eos_token_ids,
                client_id=client_id,
                cache_salt=request.cache_salt,
                kv_transfer=request.kv_transfer,
                output_token_ids=request.output_token_ids,
                on_preemption=request.on_preemption,
                skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            )
        )
        if request.sampling_params.structured_output is not None:
            self._grammars.compile(request.sampling_params.structured_output, request.caller)
        self._stages.arrived(request.request_id, client_id)

    def decline(self, request: EngineRequest) -> None:
        """Notifies the prefill worker of a refused request that the prompt will not be loaded."""
        request_id, transfer = request.request_id, request.kv_transfer
        if transfer is not None and transfer.role is TransferRole.CONSUMER:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            begin = BeginLoad(request_id, transfer, num_tokens)
            abort = AbortLoad(request_id, "the decode worker refused the request")
            self._connector.send_commands(KVConnectorMetadata((begin, abort), (), ()))

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, error: str | None = None
    ) -> ClientOutputs:
        """Ends requests in any state; unknown and finished ones are ignored."""
        self.may_progress = True  # the runner and the connector must be notified
        outputs = ClientOutputs()
        self._end_between_steps(self.scheduler.finish_requests(request_ids, status, error), outputs)
        self._grammars.keep_only(self.scheduler.wanted_grammars())
        return outputs

    def give_back_requests(self, error: str) -> ClientOutputs:
        """Ends all requests in any state with ErrorKind.GIVEN_BACK; other workers continue them.

        They get no further output here. If a current step samples tokens for them, another worker samples these tokens
        again.
        """
        return self.finish_requests(self.scheduler.request_ids, RequestStatus.FINISHED_GIVEN_BACK, error)

    def load(self) -> tuple[WorkerLoad, float | None]:
        """The load without `oldest_waiting_s`, and the arrival of the oldest waiting request on the engine's clock.

        Looks at every request, so call it rarely.
        """
        waiting = self.scheduler.waiting_load()
        load = WorkerLoad(
            num_queued_prompt_tokens=waiting.num_prompt_tokens,
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_step_s=self._meter.decode_step_s,
        )
        return load, waiting.oldest_arrival

    def counters(self) -> dict[str, int]:
        """Monotonic counts of the scheduler and the steps. The connector has counts of its own, with other names."""
        return {**self.scheduler.counters(), "non_finite_steps": self.health.num_non_finite_steps}

    def close(self) -> None:
        """Ends after the current step, whose output is dropped. Also ends all hand-overs: see BlockMover.shutdown."""
        self._pipeline.close()
        self._connector.shutdown()
        self._grammars.close()
        if self._trace is not None:
            self._trace.close()

    def _check_vocabulary(self, name: str, token_ids: tuple[int, ...]) -> None:
        """Refuses tokens without an embedding: they would fail the step, and every request in it."""
        vocab_size = self._grammars.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(name, f"token ids must be 0 to {vocab_size - 1}, got {wrong}")

    def _take_finished(self, outputs: ClientOutputs) -> None:
        """Processes what ended since the last step: transfers, and the compilation of grammars."""
        kv_output = self._with_known_tokens(self._connector.get_finished())
        self._stages.received(kv_output.finished_recving)
        for client_id, output in self._stages.transferred(kv_output.transfers):
            outputs[client_id].append(output)
        self._end_between_steps(self.scheduler.update_connector_output(kv_output), outputs)
        for grammar in self._grammars.take_compiled():
            ended = self.scheduler.grammar_compiled(grammar.output, grammar.error)
            self._end_between_steps(ended, outputs)
        if self._grammars.is_full:
            self._grammars.evict(self.scheduler.grammars_in_use())

    def _with_known_tokens(self, kv_output: KVConnectorOutput) -> KVConnectorOutput:
        """`kv_output`, but loads whose first token is not in the vocabulary count as failed, without valid blocks."""
        received, failed, vocab_size = [], list(kv_output.failed_recving), self._grammars.vocab_size
        for load in kv_output.finished_recving:
            if 0 <= (token_id := load.first_token.token_id) < vocab_size:
                received.append(load)
            else:
                reason = f"the prefill worker sampled token {token_id}, which is not in the vocabulary"
                failed.append(FailedKV(load.request_id, 0, reason))
        if len(received) == len(kv_output.finished_recving):
            return kv_output
        return replace(kv_output, finished_recving=tuple(received), failed_recving=tuple(failed))

    def _submit(self, plan: SchedulerOutput) -> None:
        self._connector.send_commands(plan.kv_connector_metadata)
        for step in self._under_way:
            step.preempted |= plan.preempted_req_ids
        if not self._under_way:
            self._connector.start_load_kv(plan.kv_connector_metadata)
        self._under_way.append(StepUnderWay(plan, self.progress.now()))
        self._pipeline.submit(plan)

    def _complete_oldest(self) -> ClientOutputs:
        """Waits for the oldest current step and processes its samples."""
        result = self._take_result()
        step = self._under_way.popleft()
        if result.output is None:
            assert result.error is not None
            return self._fail(step.plan, result.error)
        self._measure(step)
        self._connector.save_kv_blocks(step.plan.kv_connector_metadata, step.preempted)
        if self._under_way:
            self._connector.start_load_kv(self._under_way[0].plan.kv_connector_metadata)
        if step.plan.num_scheduled_tokens:
            self._num_failed_steps = 0
        given_back = self._on_non_finite(result.output.non_finite)
        outputs = self.scheduler.update_from_output(step.plan, result.output)
        if worn := result.output.worn:
            outputs = _joined(outputs, self._give_back_worn(worn))
        if step.plan.scheduled_spec_decode_tokens:
            _note_drafts(step.plan.scheduled_spec_decode_tokens, result.output.sampled_token_ids, outputs)
        return self._traced(step.plan, result.output, _joined(given_back, outputs))

    def _take_result(self) -> StepResult:
        return self._results.popleft() if self._results else self._pipeline.take_result()

    def _on_non_finite(self, request_ids: Set[str]) -> ClientOutputs:
        """Counts a step with logits of these requests that are not finite, and checks the device.

        Does nothing if all of these requests have ended since the step was planned.
        """
        if not request_ids or request_ids.isdisjoint(self.scheduler.request_ids):
            return ClientOutputs()
        logger.error("a step computed logits that are not finite, for %d request(s)", len(request_ids))
        self.health.count_non_finite_step()
        return self._give_back_if_unfit(NON_FINITE, request_ids)

    def _give_back_if_unfit(self, failure: str, request_ids: Iterable[str]) -> ClientOutputs:
        """Gives these requests back if the device caused the failure: they may be harmless."""
        if self.health.is_fit_after(failure):
            return ClientOutputs()
        status, error = RequestStatus.FINISHED_GIVEN_BACK, "the device of this worker is at fault"
        return self.scheduler.finish_requests(request_ids, status, error)

    def _give_back_worn(self, worn: Mapping[str, str]) -> ClientOutputs:
        """Gives back requests whose compiled grammar is at a limit: the next worker compiles the grammar again."""
        reason = next(iter(worn.values()))
        return self.scheduler.finish_requests(worn, RequestStatus.FINISHED_GIVEN_BACK, reason)

    def _check_device_between_steps(self) -> str | None:
        """Computes a known token after the current steps. Returns why this failed; None if it succeeded."""
        num_results = len(self._under_way) - len(self._results)
        self._results += [self._pipeline.take_result() for _ in range(num_results)]
        return fault_of_device(self._pipeline, self.scheduler.kv_groups)

    def _measure(self, step: StepUnderWay) -> None:
        num_tokens, num_requests = step.plan.total_num_scheduled_tokens, len(step.plan.num_scheduled_tokens)
        num_prompt_tokens = self._prompt_tokens.count(step.plan)
        time_s = self._meter.step_done(
            num_prompt_tokens, num_requests, step.submitted_at, self.progress.now()
        )
        if num_tokens:
            self.steps.done(num_prompt_tokens, num_tokens - num_prompt_tokens, time_s)

    def _fail(self, plan: SchedulerOutput, error: Exception) -> ClientOutputs:
        """Retries the step's requests in halves, to end only the request that breaks it.

        Until one request has been computed, the device may be at fault, so the failure is counted.
        """
        if not (self.scheduler.is_trying and self.scheduler.has_computed_in_trial):
            self._num_failed_steps += 1
        num_requests = len(plan.num_scheduled_tokens)
        logger.error("a step of %d request(s) failed: %s", num_requests, error, exc_info=error)
        if isinstance(error, DeviceLostError):
            raise error
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"the device failed to compute {MAX_FAILED_STEPS} steps in a row") from error
        given_back = ClientOutputs()
        if num_requests == 1:
            failure = f"the device failed to compute a step ({error})"
            given_back = self._give_back_if_unfit(failure, plan.num_scheduled_tokens)
        nothing, later = ModelRunnerOutput({}), list[SchedulerOutput]()
        while self._under_way:  # planned on top of the failed step, so its output is useless
            self._take_result()
            later.append(self._under_way.popleft().plan)
            self._connector.start_load_kv(later[-1].kv_connector_metadata)
        outputs = self.scheduler.retry_in_halves(plan, later, f"{type(error).__name__}: {error}")
        outputs = self._traced(plan, nothing, _joined(given_back, outputs))
        for useless in later:
            self._traced(useless, nothing, ClientOutputs())
        return outputs

    def _traced(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, outputs: ClientOutputs
    ) -> ClientOutputs:
        if self._trace is not None:
            self._trace.done(plan.step, output.sampled_token_ids, outputs)
        return outputs

    def _end_between_steps(self, ended: ClientOutputs, outputs: ClientOutputs) -> None:
        if self._trace is not None:
            self._trace.ended(ended)
        self._add_with_stages(ended, outputs)

    def _add_with_stages(self, latest: ClientOutputs, outputs: ClientOutputs) -> None:
        """Adds the latest outputs to `outputs`, with the stages of every request that ended."""
        for client_id, latest_of_client in latest.items():
            for output in latest_of_client:
                stages = self._stages.produced(output)
                outputs[client_id].append(replace(output, stage_times=stages) if stages else output)


def _joined(first: ClientOutputs, second: ClientOutputs) -> ClientOutputs:
    """The outputs of both, by client. Each client's outputs in `first` come before those in `second`."""
    if not first:
        return second
    joined = ClientOutputs()
    for outputs in (first, second):
        for client_id, of_client in outputs.items():
            joined[client_id] += of_client
    return joined


def _note_drafts(
    drafts: Mapping[str, tuple[int, ...]],
    sampled: Mapping[str, list[int]],
    outputs: ClientOutputs,
) -> None:
    """Adds counts of drafts to a step's outputs. All of a request's samples but one are accepted drafts."""
    for output in chain.from_iterable(outputs.values()):
        token_ids = sampled.get(output.request_id)
        if token_ids and output.token_ids and output.request_id in drafts:
            output.num_draft_tokens = len(drafts[output.request_id])
            output.num_accepted_draft_tokens = len(token_ids) - 1
