"""Workers change their roles and are drained while clients stream: every answer is what it would have been."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from baton.config import BatonConfig
from baton.messages.control import Drain, Drained, SetRole, WaitStatus
from baton.worker import WorkerRole
from tests.factories.local_cluster import HANDING_OVER, local_cluster

pytestmark = pytest.mark.slow

NUM_CLIENTS = 4


def test_c50_roles_change_and_workers_drain_under_load_and_no_token_with_them(
    folder: Path, tmp_path: Path
) -> None:
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"num_threads": 1},
            "scheduler": {"num_blocks": 400},
            "kv_transfer": {"lease_s": 3.0},
            "gateway": HANDING_OVER,
            "network": {"secret_file": str(tmp_path / "secret")},
            "cluster": {"prefill": 1, "decode": 2},
        }
    )

    async def scenario() -> None:
        async with local_cluster(config, folder) as cluster:
            w0, w1, w2 = (cluster.workers[name].control() for name in ("w0", "w1", "w2"))

            async def ask(number: int) -> tuple[int, ...]:
                prompt = [5 + number] * 40
                answer = await cluster.answer(prompt, temperature=0.0, max_tokens=300, ignore_eos=True)
                return answer.token_ids

            async def ask_all() -> list[tuple[int, ...]]:
                return await asyncio.gather(*[ask(number) for number in range(NUM_CLIENTS)])

            undisturbed = await ask_all()

            async def under_load(order: Awaitable[object]) -> object:
                answers = asyncio.create_task(ask_all())
                await asyncio.sleep(0.3)  # they are well under way
                outcome = await order
                assert await answers == undisturbed
                return outcome

            await under_load(w2.call(SetRole(WorkerRole.PREFILL, 0.1)))
            assert await under_load(w0.call(Drain(0.1))) == Drained(True), "w2 computes the prompts now"
            await under_load(w2.call(SetRole(WorkerRole.DECODE, 0.1)))
            assert await under_load(w1.call(Drain(0.1))) == Drained(True), "w2 decodes now, all by itself"
            assert await ask_all() == undisturbed
            assert (await w2.call(WaitStatus(0.0))).load.decode_step_s > 0.0

    asyncio.run(scenario())
