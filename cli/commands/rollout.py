"""`baton rollout`: restarts workers, one after the other, while the others serve."""

import asyncio
import json
from collections.abc import Callable, Sequence

from baton.fleet import RolloutStep
from cli.commands.operator_calls import carry_out, of_absent, running_command
from cli.target import Target
from gateway.client import GatewayError


def run(target: Target, workers: Sequence[str], as_json: bool) -> int:
    """Returns once these workers (by default all) were restarted.

    Raises GatewayError if the rollout stopped.
    """
    steps: list[RolloutStep] = []

    def on_step(step: RolloutStep) -> None:
        steps.append(step)
        stage.note(f"{step.worker} serves again, {step.done} of {step.count}")

    with running_command("rollout", "restarting one worker after the other", as_json) as stage:
        try:
            total_s = asyncio.run(_follow(target, workers, on_step, stage.say))
        except GatewayError as error:
            raise error if not steps else _with_progress(error, steps) from None
        stage(f"{len(steps)} workers restarted")
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
        error.code, f"{error.message}; restarted before that: {len(steps)} of {steps[-1].count}: {done}"
    )
