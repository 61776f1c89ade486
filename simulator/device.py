"""SimRunner: a device whose model is a pure function, and which notices wrong KV.

KV depends on the tokens so far, and the next token on prompt and position. The device reads back every slot
that attention would read, and samples a wrong token if one byte is wrong.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import xxhash

from baton.kv_groups import NULL_BLOCK_ID, ONE_GROUP, KVGroups
from baton.step import ChunkLogprobs, ModelRunnerOutput, SchedulerOutput
from engine.pipeline import StepResult
from kv_transfer.transport.base import Bytes
from simulator.model import BREAKS_STEPS, KILLS_WORKERS, WRONG, forced, guesses, next_token, prompt_logprobs
from simulator.world import Process, World
from worker.device_check import CHECKING

NUM_PLANES = 2
"""Keys and values of one layer: a KV group has one layer here."""
NUM_HEADS = 2
CELL_BYTES = 4
"""Bytes of one token in one head of one plane."""
SLOT_BYTES = NUM_PLANES * NUM_HEADS * CELL_BYTES

NAN = 255
"""Fills the KV of a step whose values are not finite. Attention over this KV is not finite either."""


class DeviceFailure(RuntimeError):
    """A fault of the device, which may occur in any step."""


def kv_of(token_ids: Sequence[int], previous: bytes = b"") -> bytearray:
    """The KV of these tokens: SLOT_BYTES for each token, which depend on all tokens before it."""
    kv = bytearray()
    for token_id in token_ids:
        previous = xxhash.xxh3_128_digest(previous + token_id.to_bytes(4, "little"))
        kv += previous
    return kv


@dataclass(slots=True)
class KnownRequest:
    """What a runner remembers of a request between steps."""

    prompt: tuple[int, ...]
    num_tokens: int
    block_ids: list[int]
    kv: bytearray
    """The bytes that the slots of all tokens of the request must contain."""
    has_grammar: bool
    wants_prompt_logprobs: bool

    def prompt_logprobs(self, start: int, end: int) -> ChunkLogprobs | None:
        """Log-probabilities of the prompt's tokens that follow the tokens of a step; None if not wanted."""
        if not self.wants_prompt_logprobs or self.num_tokens > len(self.prompt):
            return None
        return ChunkLogprobs(start + 1, prompt_logprobs(self.prompt, start + 1, end + 1))


class SimRunner:
    """Computes plans in a pool: uint8 [blocks, planes, heads, tokens, bytes of a cell]."""

    def __init__(
        self,
        world: World,
        name: str,
        pool_NPHTB: Bytes,
        num_host_blocks: int,
        step_s: Callable[[], float],
        num_drafts: int = 0,
        groups: KVGroups = ONE_GROUP,
    ) -> None:
        self._world = world
        self._groups = groups
        self._name = name
        self._pool = pool_NPHTB
        self._host = np.zeros((num_host_blocks, *pool_NPHTB.shape[1:]), np.uint8)
        self._block_size = pool_NPHTB.shape[3]
        self._known: dict[str, KnownRequest] = {}
        self._num_drafts = num_drafts
        self.step_s = step_s
        self.must_fail = False
        """The next step that computes anything raises DeviceFailure."""
        self.on_killed: Callable[[], None] = lambda: None
        """Called when a request ends this device's process."""
        self.blocks_to_load: Callable[[], Set[int]] = frozenset
        """The blocks that transfers may still write."""
        self.num_spoiled_steps: float = 0
        """The number of further samples whose logits are not finite; inf: all samples."""
        self._has_spoiled = False
        self._spoiled: set[str] = set()
        """Requests whose KV is not finite: they had such a sample, or read KV that is not finite."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Writes the slots of all requests before it reads any, as each of a model's layers does."""
        if CHECKING in plan.num_scheduled_tokens:
            return self._check()
        for request_id in plan.finished_req_ids:
            self._known.pop(request_id, None)
            self._spoiled.discard(request_id)
        for block_id, host_block_id in plan.swap_out:
            self._host[host_block_id] = self._pool[block_id]
        for host_block_id, block_id in plan.swap_in:
            self._pool[block_id] = self._host[host_block_id]
        starts = self._learn(plan)
        if self.must_fail and starts:
            self.must_fail = False
            self._world.counts["fault device failed"] += 1
            if len(starts) == 1:
                self._world.accidents[self._known[next(iter(starts))].prompt] += 1
            raise DeviceFailure("the device has failed")
        self._fail_if_poisoned({self._known[request_id].prompt[0] for request_id in starts})
        ends = {request_id: starts[request_id] + num for request_id, num in plan.num_scheduled_tokens.items()}
        drafts = {request_id: plan.scheduled_spec_decode_tokens.get(request_id, ()) for request_id in ends}
        loading = self.blocks_to_load()
        for request_id, end in ends.items():
            known = self._known[request_id]
            known.kv += kv_of(drafts[request_id], bytes(known.kv[-SLOT_BYTES:]))
            self._check_no_load(loading, known, starts[request_id], end)
            self._write(known, starts[request_id], end)
        sampled, non_finite, guessed, forced_runs = {}, set(), {}, dict[str, tuple[int, ...]]()
        all_prompt_logprobs = {}
        for request_id, end in ends.items():
            known = self._known[request_id]
            num_missing = known.num_tokens + len(drafts[request_id]) - end
            if num_missing < 0 or (num_missing and drafts[request_id]):
                self._world.violate("plans", f"{self._name}: {request_id} is scheduled past its known tokens")
            samples = num_missing == 0
            of_prompt = known.prompt_logprobs(starts[request_id], end)
            if self._spoils(known, starts[request_id], end, request_id, samples=samples):
                if samples:
                    self._sample(known, is_right=False)
                if samples or of_prompt:
                    non_finite.add(request_id)
                continue
            if of_prompt:
                all_prompt_logprobs[request_id] = of_prompt
            is_right = self._is_right(known, starts[request_id], end, request_id)
            if samples:
                sampled[request_id] = self._verified(known, drafts[request_id], is_right)
                position = known.num_tokens - len(known.prompt)
                if known.has_grammar and is_right:
                    forced_runs[request_id] = forced(known.prompt, position)
                following = guesses(known.prompt, position, self._num_drafts)
                if following and not forced_runs.get(request_id):
                    guessed[request_id] = following
        return ModelRunnerOutput(
            sampled,
            non_finite=non_finite,
            draft_token_ids=guessed,
            forced_token_ids={name: run for name, run in forced_runs.items() if run},
            unforeseeable=guessed.keys() | forced_runs.keys(),
            prompt_logprobs=all_prompt_logprobs,
        )

    def _check(self) -> ModelRunnerOutput:
        """The device check; nothing reads the KV of its token."""
        if self.must_fail:
            self.must_fail = False
            raise DeviceFailure("the device has failed")
        is_wrong = self.num_spoiled_steps > 0
        self.num_spoiled_steps -= is_wrong
        return ModelRunnerOutput({}, non_finite={CHECKING} if is_wrong else frozenset())

    def _fail_if_poisoned(self, first_tokens: set[int]) -> None:
        if KILLS_WORKERS in first_tokens:
            self._world.counts["fault poison killed"] += 1
            self.on_killed()
            raise DeviceFailure("its process has ended")
        if BREAKS_STEPS in first_tokens:
            self._world.counts["fault poison broke a step"] += 1
            raise DeviceFailure("a request breaks the step")

    def _learn(self, plan: SchedulerOutput) -> dict[str, int]:
        """Stores forced tokens, new requests and blocks; returns where each request's step starts."""
        starts = {}
        for request_id, token_ids in plan.forced_token_ids.items():
            if request_id in self._known:
                known = self._known[request_id]
                known.kv += kv_of(token_ids, bytes(known.kv[-SLOT_BYTES:]))
                known.num_tokens += len(token_ids)
        for new in plan.scheduled_new_reqs:
            tokens, has_grammar = (
                new.prompt_token_ids + new.output_token_ids,
                new.sampling_params.structured_output,
            )
            self._known[new.request_id] = KnownRequest(
                new.prompt_token_ids,
                len(tokens),
                list(new.block_ids),
                kv_of(tokens),
                has_grammar is not None,
                new.sampling_params.prompt_logprobs is not None,
            )
            starts[new.request_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        changes = zip(cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed_tokens in changes:
            known = self._known[request_id]
            if request_id in cached.resumed_num_tokens:
                known.block_ids = []
                known.num_tokens = cached.resumed_num_tokens[request_id]
                del known.kv[known.num_tokens * SLOT_BYTES :]
            known.block_ids += block_ids
            starts[request_id] = num_computed_tokens
        return starts

    def _slots(self, known: KnownRequest, group: int, start: int, end: int) -> tuple[Bytes, Bytes]:
        """For each position: the group's block that contains it, and its offset in this block."""
        rows, offsets = np.divmod(np.arange(start, end), self._block_size)
        return np.asarray(known.block_ids)[rows * self._groups.num_groups + group], offsets

    def _content(self, known: KnownRequest, group: int, start: int, end: int) -> Bytes:
        """The bytes that the group's slots must contain; each group has its own KV."""
        kv = np.frombuffer(bytes(known.kv[start * SLOT_BYTES : end * SLOT_BYTES]), np.uint8)
        return kv.reshape(-1, NUM_PLANES, NUM_HEADS, CELL_BYTES) ^ np.uint8(group)

    def _write(self, known: KnownRequest, start: int, end: int) -> None:
        for group in range(self._groups.num_groups):
            blocks, offsets = self._slots(known, group, start, end)
            assert (blocks != NULL_BLOCK_ID).all(), "a step writes the null block"
            self._pool[blocks, :, :, offsets] = self._content(known, group, start, end)

    def _check_no_load(self, loading: Set[int], known: KnownRequest, start: int, end: int) -> None:
        """Checks that no transfer may write what a step writes. This is checked before the step writes: KV that was
        overwritten is read much later, if ever."""
        for group in range(self._groups.num_groups if loading else 0):
            blocks, _ = self._slots(known, group, start, end)
            if both := loading & set(blocks.tolist()):
                written = f"{self._name}: a step and a load both write {sorted(both)}"
                self._world.violate("blocks that may still be written are not free", written)

    def _reads_from(self, group: int, start: int) -> int:
        """The first position that tokens from `start` on attend to."""
        is_windowed = group >= self._groups.num_full
        return max(0, start - self._groups.window + 1) if is_windowed else 0

    def _reads_nan(self, known: KnownRequest, start: int, end: int) -> bool:
        for group in range(self._groups.num_groups):
            blocks, offsets = self._slots(known, group, self._reads_from(group, start), end)
            if (self._pool[blocks, :, :, offsets] == NAN).all(axis=(1, 2, 3)).any():
                return True
        return False

    def _spoils(self, known: KnownRequest, start: int, end: int, request_id: str, *, samples: bool) -> bool:
        """Whether this step computes NaN for the request: by a fault, or because it reads NaN."""
        if self.num_spoiled_steps and samples:
            self.num_spoiled_steps -= 1
            if self.num_spoiled_steps < math.inf:
                self._world.accidents[known.prompt] += 1
            self._has_spoiled = True
            self._spoiled.add(request_id)
            self._world.counts["fault not finite"] += 1
        elif self._has_spoiled and self._reads_nan(known, start, end):
            self._spoiled.add(request_id)
        if request_id not in self._spoiled:
            return False
        for group in range(self._groups.num_groups):
            blocks, offsets = self._slots(known, group, start, end)
            self._pool[blocks, :, :, offsets] = NAN
        return True

    def _is_right(self, known: KnownRequest, start: int, end: int, request_id: str) -> bool:
        for group in range(self._groups.num_groups):
            first = self._reads_from(group, start)
            blocks, offsets = self._slots(known, group, first, end)
            differs = self._pool[blocks, :, :, offsets] != self._content(known, group, first, end)
            if differs.any():
                index = int(np.flatnonzero(differs.any(axis=(1, 2, 3)))[0])
                self._world.violate(
                    "KV is right",
                    f"{self._name}: {request_id} reads foreign KV at position {first + index}, "
                    f"block {blocks[index]} of group {group}",
                )
                return False
        return True

    def _verified(self, known: KnownRequest, drafts: Sequence[int], is_right: bool) -> list[int]:
        """The drafts that are right, and the token after them."""
        token_ids = [self._sample(known, is_right)]
        for draft in drafts:
            if draft != token_ids[-1]:
                break
            token_ids.append(self._sample(known, is_right))
        return token_ids

    def _sample(self, known: KnownRequest, is_right: bool) -> int:
        del known.kv[known.num_tokens * SLOT_BYTES :]  # removes the KV of drafts
        token_id = next_token(known.prompt, known.num_tokens - len(known.prompt)) if is_right else WRONG
        known.kv += kv_of([token_id], bytes(known.kv[-SLOT_BYTES:]))
        known.num_tokens += 1
        return token_id


@dataclass(frozen=True, slots=True)
class Computed:
    """A `Launched` step that is computed already."""

    output: ModelRunnerOutput

    def wait(self) -> ModelRunnerOutput:
        return self.output


class SlowRunner:
    """Lets a step's time pass before it computes the step. Meanwhile, peers and transfers run. Used without async
    scheduling."""

    def __init__(self, world: World, runner: SimRunner) -> None:
        self._world = world
        self._runner = runner

    def launch(self, plan: SchedulerOutput) -> Computed:
        if plan.num_scheduled_tokens:
            end = self._world.now + self._runner.step_s()
            is_over: list[bool] = []
            self._world.at(end, lambda: is_over.append(True))
            self._world.pass_time(lambda: bool(is_over))
        result = execute(self._runner, plan, self._world)
        if result.output is None:
            assert result.error is not None
            raise result.error
        return Computed(result.output)


@dataclass(slots=True)
class AsyncDevice:
    """A `Pipeline` without a thread: computes one step while the next is planned."""

    world: World
    runner: SimRunner
    process: Process
    _plans: "deque[SchedulerOutput]" = field(default_factory=deque)
    _results: "deque[StepResult]" = field(default_factory=deque)
    _is_broken: bool = False
    """A step has failed, so the steps planned on top of it fail, too."""

    def num_ahead(self, plan: SchedulerOutput) -> int:
        return int(bool(plan.num_scheduled_tokens))

    def submit(self, plan: SchedulerOutput) -> None:
        if not self._plans and not self._results:
            self._is_broken = False
        self._plans.append(plan)
        if len(self._plans) == 1:
            self._begin()

    def take_result(self) -> StepResult:
        self.world.pass_time(lambda: bool(self._results) or self.process.is_dead)
        if not self._results:  # the run has ended, or a request has ended the process
            return StepResult(ModelRunnerOutput({}))
        return self._results.popleft()

    def close(self) -> None:
        """Nothing to end."""

    def _begin(self) -> None:
        duration_s = self.runner.step_s() if self._plans[0].num_scheduled_tokens else 0.0
        self.world.after(duration_s, self._end, self.process)

    def _end(self) -> None:
        plan = self._plans.popleft()
        if self._is_broken:
            self._results.append(StepResult(None, DeviceFailure("the step before has failed")))
        else:
            self._results.append(execute(self.runner, plan, self.world))
            self._is_broken = self._results[-1].output is None
        if self._plans:
            self._begin()


def execute(runner: SimRunner, plan: SchedulerOutput, world: World) -> StepResult:
    """Runs a plan, as a device's thread does. An invalid plan is a violation, not a failure of the device."""
    try:
        return StepResult(runner.execute(plan))
    except DeviceFailure as error:
        return StepResult(None, error)
    except Exception as error:
        world.violate("plans", f"{type(error).__name__}: {error}")
        return StepResult(None, error)
