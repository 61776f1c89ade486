"""`baton rollout`: restarts workers, one after the other, while the others serve."""

import asyncio
import json
from collections.abc import Callable, Sequence

from baton.fleet import RolloutStep
from cli.commands.operator_calls import carry_out, of_absent, ordering
from cli.target import Target
from gateway.client import GatewayError


def run(target: Target, workers: Sequence[str], as_json: bool) -> int:
    """Returns once these workers, or all, live anew. GatewayError says what stopped it, and how many did by then."""
    steps: list[RolloutStep] = []

    def on_step(step: RolloutStep) -> None:
        steps.append(step)
        stage.note(f"{step.worker} serves anew, {step.done} of {step.count}")

    with ordering("rollout", "one worker after the other", as_json) as stage:
        try:
            total_s = asyncio.run(_follow(target, workers, on_step, stage.say))
        except GatewayError as error:
            raise error if not steps else _with_progress(error, steps) from None
        stage(f"{len(steps)} workers live anew")
    if as_json:
        renewed = [{"worker": step.worker, "incarnation": step.incarnation} for step in steps]
        print(json.dumps({"workers": renewed, "total_s": total_s}))
    return 0


async def _follow(
    target: Target, workers: Sequence[str], on_step: Callable[[RolloutStep], None], say: Callable[[str], None]
) -> float:
    async with target.client() as client:

        async def all_steps() -> None:
            async for step in client.rollout(workers):
                on_step(step)

        return await carry_out(all_steps(), client, of_absent, say)


def _with_progress(error: GatewayError, steps: list[RolloutStep]) -> GatewayError:
    done = ", ".join(step.worker for step in steps)
    return GatewayError(
        error.code, f"{error.message}; by then {len(steps)} of {steps[-1].count} lived anew: {done}"
    )
