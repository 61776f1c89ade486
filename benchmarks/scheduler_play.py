"""Plays a workload on a scheduler. Knows no particular scheduler, and needs only Python itself.

It plays any implementation of `Side`. So two schedulers that are compared get the same arrivals, the same
aborts and the same model: a token is a pure function of its request and position.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from benchmarks.scheduler_workloads import RequestSpec, Workload, token_at

MAX_STEPS = 3_000
"""Limit of steps. A workload that is not done after this many steps counts as endless."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one request gets in a step. Before the step, `num_computed_tokens` of its tokens were computed."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    is_admitted: bool
    """The request did not run before, so its computed tokens came from the prefix cache."""
    new_block_ids: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    """Drafts are the last of the request's tokens in the step."""

    def __str__(self) -> str:
        cached = f"@{self.num_computed_tokens}" if self.is_admitted else ""
        drafts = f"~{','.join(map(str, self.drafts))}" if self.drafts else ""
        return f"{self.request_id}:{self.num_tokens}{cached}{drafts}"


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended with a step's tokens, and the reason."""

    request_id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.request_id}={self.reason}"


@dataclass(frozen=True, slots=True)
class Decisions:
    """One step of a scheduler: the requests that run, are preempted, or end, each in order."""

    shares: tuple[Share, ...]
    preempted: frozenset[str]
    ended: tuple[Ended, ...] = ()

    def __str__(self) -> str:
        """One line, such as `r0:1 r3:16@32 r4:3~7,9 -r5 r0=stop`.

        Here r0 runs 1 token, r3 is admitted with 32 of its tokens cached, and r4 has the drafts 7 and 9. r5
        is preempted, and r0 ends.
        """
        preempted = [f"-{request_id}" for request_id in sorted(self.preempted)]
        return " ".join([*map(str, self.shares), *preempted, *map(str, self.ended)])

    @property
    def blocks(self) -> str:
        """The block ids that the requests got. These ids influence only the prefix cache."""
        return " ".join(
            f"{share.request_id}:{','.join(map(str, share.new_block_ids))}" for share in self.shares
        )


class Side(Protocol):
    """A scheduler that can be played. Its plans, runner outputs and reports may have any type."""

    @property
    def num_unfinished(self) -> int: ...

    def add(self, spec: RequestSpec, prompt_token_ids: list[int]) -> None: ...

    def abort(self, request_id: str) -> None:
        """Aborts a request. If the request has ended already, this has no effect."""
        ...

    def schedule(self) -> Any:
        """Plans the next step, and returns the plan."""
        ...

    def decisions(self, plan: Any) -> Decisions: ...

    def request_ids(self, plan: Any) -> list[str]:
        """The ids of the requests that run in the plan."""
        ...

    def runner_output(self, plan: Any, sampled: dict[str, list[int]], drafts: dict[str, list[int]]) -> Any:
        """The output of a model runner for the plan, with new drafts of all its requests."""
        ...

    def update(self, plan: Any, runner_output: Any) -> Any:
        """Passes the runner's output to the scheduler, and returns a report."""
        ...

    def ended(self, report: Any) -> tuple[Ended, ...]: ...


class Model:
    """A model that verifies drafts, and samples once a step has computed all known tokens of a request."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._specs: dict[str, RequestSpec] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}

    def learn(self, spec: RequestSpec) -> list[int]:
        """Learns a request that arrives, and returns its prompt."""
        token_ids = spec.prompt_token_ids
        self._specs[spec.request_id] = spec
        self._num_prompt_tokens[spec.request_id] = self._num_tokens[spec.request_id] = len(token_ids)
        return token_ids

    def run(self, decisions: Decisions) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The sampled tokens of each request that samples, and new drafts."""
        sampled: dict[str, list[int]] = {}
        drafts: dict[str, list[int]] = {}
        for share in decisions.shares:
            request_id, num_tokens = share.request_id, self._num_tokens[share.request_id]
            if share.num_computed_tokens + share.num_tokens - len(share.drafts) == num_tokens:
                position = num_tokens - self._num_prompt_tokens[request_id]
                sampled[request_id] = _verified(request_id, position, share.drafts)
                self._num_tokens[request_id] += len(sampled[request_id])
                if most := self._num_speculative_tokens:
                    position += len(sampled[request_id])
                    drafts[request_id] = self._specs[request_id].drafts_at(position, most)
        return sampled, drafts


def _verified(request_id: str, position: int, drafts: tuple[int, ...]) -> list[int]:
    """The drafts that are right, and the token after them."""
    token_ids = [token_at(request_id, position)]
    for draft in drafts:
        if draft != token_ids[-1]:
            break
        token_ids.append(token_at(request_id, position + len(token_ids)))
    return token_ids


def play(side: Side, workload: Workload, num_ahead: int = 0) -> Iterator[Decisions]:
    """Yields every step from the first arrival to the last token, at most `MAX_STEPS` steps.

    A step is planned when all earlier steps except the last `num_ahead` are computed. Ends are reported
    together with the step that was planned last.
    """
    arrivals = deque(workload.requests)
    model = Model(workload.settings.num_speculative_tokens)
    under_way: deque[tuple[Any, tuple[dict[str, list[int]], dict[str, list[int]]]]] = deque()
    for number in range(MAX_STEPS):
        while arrivals and arrivals[0].arrival_step <= number:
            spec = arrivals.popleft()
            side.add(spec, model.learn(spec))
        for spec in workload.requests:
            if spec.abort_step == number:
                side.abort(spec.request_id)
        plan = side.schedule()
        decisions = side.decisions(plan)
        under_way.append((plan, model.run(decisions)))
        ended: tuple[Ended, ...] = ()
        if len(under_way) > num_ahead:
            plan, tokens = under_way.popleft()
            ended = side.ended(side.update(plan, side.runner_output(plan, *tokens)))
        yield replace(decisions, ended=ended)
        if not arrivals and not side.num_unfinished:
            return
