"""How an answer is shown: as the object that programs read, and as lines for people."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cli.commands.demo import show_timeline
from cli.commands.generate import GeneratedAnswer, _write, to_json
from gateway.client import GenerationEnd

HOSTILE = "\x1b[2J\x9b\ré\t\n"
TIMING: dict[str, Any] = {
    "ttft_s": 0.125,
    "itl_s": [0.05, 0.025, 0.025],
    "queue_s": 0.005,
    "prefill_s": 0.1,
    "transfer_s": 0.02,
    "transfer_bytes": 1_105_920,
    "transport": "shared_memory",
    "handover_s": 0.05,
    "decode_s": 0.1,
    "total_s": 0.225,
    "transfers": [
        {
            "worker": "d0",
            "role": "consumer",
            "peer": "p0",
            "attempt": 1,
            "transport": "shared_memory",
            "bytes": 1_105_920,
            "events": [{"name": "asked", "at_s": 0.002}, {"name": "verified", "at_s": 0.125}],
            "reason": "",
            "exposed_s": 0.0,
        },
        {
            "worker": "p0",
            "role": "producer",
            "peer": "d0",
            "attempt": 1,
            "transport": "shared_memory",
            "bytes": 1_105_920,
            "events": [{"name": "prefilled", "at_s": 0.1}, {"name": "failed", "at_s": 0.2}],
            "reason": "the decode worker was silent for 10 s",
            "exposed_s": 0.0,
        },
    ],
}


def answer(mode: str = "disaggregated", prefill: str = "p0") -> GeneratedAnswer:
    usage = {"prompt_tokens": 37, "completion_tokens": 4, "cached_tokens": 16}
    placement = {"mode": mode, "prefill": prefill, "decode": "d0", "attempts": 1}
    return GeneratedAnswer("Hello!", (1, 2, 3, 4), GenerationEnd("stop", usage, TIMING, placement))


def shown(show_it: Any, *arguments: Any) -> str:
    out = io.StringIO()
    show_it(*arguments, Console(file=out, width=160, force_terminal=False))
    return out.getvalue()


def test_the_object_of_an_answer() -> None:
    value = to_json(answer())
    assert list(value) == ["text", "token_ids", "finish_reason", "usage", "timing", "placement"]
    assert value["token_ids"] == [1, 2, 3, 4]
    assert value["timing"] == TIMING
    assert value["placement"] == {"mode": "disaggregated", "prefill": "p0", "decode": "d0", "attempts": 1}


def test_a_local_answer_has_no_prefill_worker() -> None:
    assert to_json(answer("local", ""))["placement"]["prefill"] is None


def test_the_timeline_names_every_stage_with_its_share() -> None:
    lines = shown(show_timeline, answer()).splitlines()
    queue, prefill, transfer, decode, taken, given, total = lines[:7]
    assert "5.0 ms" in queue
    assert "100.0 ms" in prefill
    assert "37 tokens on p0" in prefill
    assert "1.11 MB of KV cache, p0 -> d0" in transfer
    assert "4 tokens on d0, 40 tokens/s" in decode
    assert taken.strip() == "d0 from p0, attempt 1: asked 2.0 ms, verified 125.0 ms"
    assert (
        given.strip()
        == "p0 to d0, attempt 1: prefilled 100.0 ms, failed 200.0 ms (the decode worker was silent for 10 s)"
    )
    assert prefill.count("█") == decode.count("█") > transfer.count("█") > queue.count("█") > 0
    assert "first token after 125.0 ms, next one 50.0 ms later; mode disaggregated, attempts 1" in total


def test_an_answer_of_one_token_has_no_pace() -> None:
    one = answer()
    completion = replace(one.completion, timing={**TIMING, "itl_s": []})
    assert "tokens/s" not in shown(show_timeline, replace(one, completion=completion))


@pytest.mark.parametrize(
    ("is_terminal", "expected"), [(True, r"\u001b[2J\u009b\u000dé" + "\t\n"), (False, HOSTILE)]
)
def test_control_characters_reach_programs_but_no_terminal(
    is_terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", out)
    _write(HOSTILE)
    assert out.getvalue() == expected
