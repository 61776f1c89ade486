"""The device check: a step with one known token.

If the device cannot compute this step either, the device is at fault, and not the request that failed before.
"""

from dataclasses import replace

from baton.kv_groups import NULL_BLOCK_ID, KVGroups
from baton.sampling import SamplingParams
from baton.step import CachedRequestData, NewRequestData, SchedulerOutput
from engine.pipeline import DeviceLostError, Pipeline

CHECKING = "device check"
"""The request id; no id of a gateway contains a space."""
_NOTHING = SchedulerOutput((), CachedRequestData(), {}, 0, frozenset(), frozenset())


def fault_of_device(pipeline: Pipeline, kv_groups: KVGroups) -> str | None:
    """Runs the check and returns why it failed; None if the device works. No step may be under way.

    The token's KV is stored in the null block: no request reads that block, and the check needs no free block.
    `kv_groups`: the model's. Raises DeviceLostError.
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
