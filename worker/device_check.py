"""Whether a device can be trusted. The device check is a step with one known token.

It runs before a worker serves. It also runs after a step of a single request has failed, and after logits that are not
finite. If the check fails, too, the device is at fault, not a request of the failed step.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from baton.clock import Clock
from baton.kv_groups import NULL_BLOCK_ID, KVGroups
from baton.sampling import SamplingParams
from baton.step import NON_FINITE, CachedRequestData, NewRequestData, SchedulerOutput
from engine.pipeline import DeviceLostError, Pipeline

logger = logging.getLogger(__name__)

CHECKING = "device check"
"""The request id of the check; no id of a gateway contains a space."""
MAX_NON_FINITE_STEPS = 8
NON_FINITE_WINDOW_S = 600.0
"""If MAX_NON_FINITE_STEPS steps within this time have logits that are not finite, the device is at fault, even if it
passes its checks. The check misses damaged memory that its token does not use."""
_NOTHING = SchedulerOutput((), CachedRequestData(), {}, 0, frozenset(), frozenset())


class DeviceHealth:
    """Whether the device can be trusted. Once unfit, it stays unfit."""

    def __init__(self, check: Callable[[], str | None], clock: Clock) -> None:
        """`check` runs the device check and returns why it failed."""
        self._check = check
        self._clock = clock
        self._non_finite_at: deque[float] = deque(maxlen=MAX_NON_FINITE_STEPS)
        self.num_non_finite_steps = 0
        """Steps whose logits were not all finite."""
        self.unfit_reason: str | None = None

    def count_non_finite_step(self) -> None:
        self.num_non_finite_steps += 1
        self._non_finite_at.append(self._clock.now())
        took_s = self._non_finite_at[-1] - self._non_finite_at[0]
        if len(self._non_finite_at) == MAX_NON_FINITE_STEPS and took_s <= NON_FINITE_WINDOW_S:
            self._become_unfit(f"{NON_FINITE}, in {MAX_NON_FINITE_STEPS} steps within {took_s:.0f} s")

    def is_fit_after(self, failure: str) -> bool:
        """Whether the device is still fit after this failure of a step. Runs the check, unless it is unfit already."""
        if self.unfit_reason is None and (fault := self._check()) is not None:
            self._become_unfit(f"{failure}; the device check also failed: {fault}")
        return self.unfit_reason is None

    def _become_unfit(self, reason: str) -> None:
        if self.unfit_reason is None:
            self.unfit_reason = reason
            logger.error("%s; this worker gives its requests back, and then ends", reason)


def fault_of_device(pipeline: Pipeline, kv_groups: KVGroups) -> str | None:
    """Runs the check and returns why it failed; None if the device works. No step may be under way.

    The token's KV is stored in the null block, so the check needs no free block. What other requests
    read of this block gets weight 0, which works only for finite values. So a worker ends if its check left values
    there that are not finite. `kv_groups`: the KV groups of the model. Raises DeviceLostError.
    """
    request = NewRequestData(
        request_id=CHECKING,
        prompt_token_ids=(0,),
        output_token_ids=(),
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        stop_token_ids=frozenset(),
        block_ids=(NULL_BLOCK_ID,) * kv_groups.num_groups,
        num_computed_tokens=0,
    )
    one_token = replace(
        _NOTHING,
        scheduled_new_reqs=(request,),
        num_scheduled_tokens={CHECKING: 1},
        total_num_scheduled_tokens=1,
    )
    plans = one_token, replace(_NOTHING, finished_req_ids=frozenset({CHECKING}))
    for plan in plans:
        pipeline.submit(plan)
    for result in [pipeline.take_result() for _ in plans]:
        if isinstance(result.error, DeviceLostError):
            raise result.error
        if result.output is None:
            return f"{type(result.error).__name__}: {result.error}"
        if result.output.non_finite:
            return "its logits are not finite"
    return None
