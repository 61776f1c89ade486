"""Why `auto` is the default: chats beside long prompts get their first tokens sooner, and no answer stutters."""

import random
from collections.abc import Callable
from typing import Literal

import pytest

from baton.config import GatewayConfig
from simulator import timed_worker
from simulator.timed_fleet import Result, TimedFleet
from simulator.workloads import Session, Turn

END_S = 60.0
CPU = {
    "STEP_S": 0.012,
    "PREFILL_TOKEN_S": 0.001,
    "DECODE_REQUEST_S": 0.001,
    "MAX_NUM_BATCHED_TOKENS": 128,
}
"""About what SmolLM2 takes on a core, with a CPU's default step."""


def sessions() -> list[Session]:
    """Four chats at a time, and a prompt of 1,024 tokens every three seconds, as in `benchmarks.interference`."""
    rng = random.Random(7)

    def all_of(caller: str, num_prompt: int, num_answer: int, pause_s: Callable[[], float]) -> list[Session]:
        found, now = list[Session](), pause_s()
        while now < END_S:
            tokens = tuple(rng.getrandbits(30) for _ in range(num_prompt + num_answer))
            turn = Turn(tokens[:num_prompt], tokens[num_prompt:], 0.0)
            found.append(Session(f"{caller}-{len(found)}", now, (), (turn,), caller))
            now += pause_s()
        return found

    return all_of("chat", 32, 48, lambda: rng.uniform(0.15, 0.45)) + all_of("long", 1_024, 4, lambda: 3.0)


def p99_ms(times_s: list[float]) -> float:
    return 1e3 * sorted(times_s)[len(times_s) * 99 // 100]


def test_with_auto_chats_do_not_wait_for_a_step_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CPU.items():
        monkeypatch.setattr(timed_worker, name, value)

    def played(mode: Literal["auto", "disaggregated", "local"]) -> Result:
        fleet = TimedFleet(GatewayConfig(routing_mode=mode), 1, 1, (8_192, 8_192), seed=1)
        result = fleet.run(sessions())
        first = {who: round(p99_ms(times)) for who, times in result.ttft_s_of.items()}
        gap = round(p99_ms(result.itl_s_of["chat"]))
        print(f"{mode}: {result.num_local} local; p99 in ms: first tokens {first}, a chat's gaps {gap}")
        return result

    auto, disaggregated = played(GatewayConfig().routing_mode), played("disaggregated")
    first_ms = [p99_ms(each.ttft_s_of["chat"]) for each in (auto, disaggregated)]
    assert first_ms[0] < first_ms[1] / 2
    assert p99_ms(auto.ttft_s_of["long"]) < p99_ms(disaggregated.ttft_s_of["long"])
    assert p99_ms(auto.itl_s_of["chat"]) < 50.0, "one step with a chat's prompt"
    assert disaggregated.num_local == 0 < auto.num_local < len(auto.ttft_s) / 2
