"""Prompts identified by their lengths, and their greedy answers by whole engines and by transformers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.request import EngineRequest
from baton.sampling import SamplingParams
from tests.factories.whole_engines import WholeEngine


def greedy_by_transformers(folder: Path, lengths: Iterable[int], num_tokens: int) -> dict[int, list[int]]:
    """The tokens of each answer, by the length of its prompt."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = {}
    for length in lengths:
        whole = model.generate(
            torch.tensor([prompt_of(length)]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        answers[length] = whole[0, length:].tolist()
    return answers


def prompt_of(length: int) -> list[int]:
    return [3 + (7 * length + 11 * at + at * at) % 290 for at in range(length)]


def greedy_request(length: int, num_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens)
    return EngineRequest(
        request_id=f"r{length}", prompt_token_ids=tuple(prompt_of(length)), sampling_params=params
    )


def answers_of(engine: WholeEngine) -> dict[int, list[int]]:
    """The engine's answers, by the length of the prompt."""
    return {int(name[1:]): answer.token_ids for name, answer in engine.answers.items()}
