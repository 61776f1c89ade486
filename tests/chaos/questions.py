"""The requests during the chaos, and their answers. Every right answer is known before the first fault."""

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from gateway.client import GatewayClient

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
    }
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its sampling parameters. `answer` is the answer of an undisturbed cluster."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    answer: "Answer | None" = None


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a client can compare."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def make_questions(rng: random.Random, number: int, vocab_size: int, max_tokens: int) -> list[Question]:
    """Short and long prompts; greedy, sampled, with penalties, with a grammar; some share beginnings."""
    stems = [_tokens(rng, rng.randint(40, 200), vocab_size) for _ in range(3)]
    questions = []
    for index in range(number):
        stem = rng.choice(stems) if rng.random() < 0.5 else ()
        prompt = stem + _tokens(rng, rng.choice([rng.randint(2, 40), rng.randint(40, 250)]), vocab_size)
        questions.append(Question(prompt, _sampling(index, rng, max_tokens)))
    return questions


def _sampling(index: int, rng: random.Random, max_tokens: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_tokens": rng.randint(max_tokens // 3, max_tokens)}
    match index % 4:
        case 0:
            return sampling | {"temperature": 0.0, "ignore_eos": True}
        case 1:
            return sampling | {"temperature": 0.8, "seed": index, "ignore_eos": True, "top_k": 50}
        case 2:
            penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
            return sampling | penalties | {"temperature": 1.0, "seed": index, "min_tokens": 5, "top_p": 0.9}
        case _:
            return sampling | {"temperature": 1.0, "seed": index, "json_schema": SCHEMA}


def _tokens(rng: random.Random, number: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, vocab_size) for _ in range(number))


async def answer_all(client: GatewayClient, questions: list[Question]) -> list[Question]:
    """The questions with their answers, asked one after another, without faults."""
    return [replace(question, answer=await ask(client, question)) for question in questions]


async def ask(client: GatewayClient, question: Question) -> Answer:
    """Asks, and returns the whole answer. Raises GatewayError if there is none."""
    token_ids: list[int] = []
    text = ""
    finish_reason = ""
    async for event in client.generate(token_ids=question.prompt, sampling=question.sampling):
        token_ids += event.token_ids
        text += event.text
        if event.completion is not None:
            finish_reason = event.completion.finish_reason
    return Answer(tuple(token_ids), text, finish_reason)
