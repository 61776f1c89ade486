"""A classical scheduler's model and our scheduler with the same requests: every step must agree."""

from collections.abc import Sequence as Tokens
from typing import Any
from zlib import crc32

from tests.factories.classical_schedulers import (
    ClassicalScheduler,
    MiniVLLM,
    Mixed,
    NanoVLLM,
    NextToken,
    Sequence,
    Step,
)
from tests.factories.driving import Driver
from tests.factories.paged_memory import PagedMemory
from tests.factories.scheduling import FakeRunner, make_request, make_scheduler, token_at

CLASSICAL: dict[str, tuple[type[ClassicalScheduler], dict[str, Any]]] = {
    "nano_vllm": (NanoVLLM, {"batching": "prefill_first"}),
    "mini_vllm": (MiniVLLM, {"batching": "prefill_first", "prefill_first_rules": "mini_vllm"}),
    "mixed": (Mixed, {"batching": "mixed"}),
}
"""The model, and the matching settings of our scheduler, by name."""


class SideBySide:
    """Compares requests, tokens, preempted requests and free blocks after every step."""

    def __init__(
        self,
        model: type[ClassicalScheduler],
        batching: dict[str, Any],
        *,
        num_blocks: int = 101,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        next_token: NextToken = token_at,
    ) -> None:
        """With `max_num_batched_tokens` None, only the pool limits a step."""
        settings: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens or (num_blocks - 1) * block_size,
            "enable_prefix_caching": enable_prefix_caching,
        }
        self.model = model(**settings, next_token=next_token)
        runner = FakeRunner(next_token, PagedMemory(block_size))
        self.driver = Driver(make_scheduler(**settings, **batching), runner)

    def add(
        self,
        name: str,
        prompt: int | Tokens[int],
        max_tokens: int = 50,
        *,
        ignore_eos: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        """Adds a request. `prompt` has its tokens, or their number.

        For `max_model_len`, our scheduler's request has a lower `max_tokens`, as from the gateway.
        """
        tokens = [100 + crc32(name.encode()) % 50_000] * prompt if isinstance(prompt, int) else list(prompt)
        self.model.add(Sequence(name, list(tokens), max_tokens, ignore_eos, max_model_len))
        if max_model_len is not None:
            max_tokens = min(max_tokens, max_model_len - len(tokens))
        self.driver.add(
            make_request(prompt=tokens, request_id=name, max_tokens=max_tokens, ignore_eos=ignore_eos)
        )

    def step(self) -> Step:
        expected = self.model.step()
        plan = self.driver.step()
        got = list(plan.num_scheduled_tokens.items())
        assert got == expected, f"{got}, but the model computes {expected}"
        assert plan.preempted_req_ids == set(self.model.preempted)
        counts = self.driver.scheduler.request_counts()
        assert (counts.running, counts.waiting) == (len(self.model.running), len(self.model.waiting))
        assert self.driver.scheduler.kv_block_counts().free == len(self.model.blocks.free)
        return got

    def steps(self, num_steps: int) -> list[dict[str, int]]:
        return [dict(self.step()) for _ in range(num_steps)]

    def finish(self) -> None:
        """Steps until neither scheduler has a request, and checks that all is at rest."""
        while self.driver.scheduler.has_requests():
            self.step()
        assert not self.model.waiting
        assert not self.model.running
        self.driver.step()  # tells the runner about the last ends
        self.driver.check_rest()
