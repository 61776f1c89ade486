"""What `baton status` prints of a fleet that is not whole."""

from typing import Any

import pytest
from rich.console import Console

from cli.commands import status
from tests.factories.descriptions import description, loaded_from, missing, node, worker

LAST_WORDS = "exit code 1:\n\x1b[36mno [memory]\x1b[0m\r\x1b]0;"

FLEET = description(
    worker(
        "w0",
        "prefill",
        kv_blocks={"free": 60, "leased": 15, "quarantined": 3},
        requests={"running": 2, "waiting": 4, "waiting_for_remote_kvs": 5},
    ),
    worker("w1", kv_peers=[loaded_from("w0", 3.0, 2, failed=1)], slot={"starts": 3}),
    missing(
        "w2",
        "crash_loop",
        starts=9,
        next_start_in_s=58.2,
        last_failure=LAST_WORDS,
    ),
    nodes=[
        node("n0", is_head=True, address="10.0.0.1"),
        node("n1", workers=["w0", "w1"], resources={"CPU": 8.0, "prefill": 1.0}),
        node("n2", is_alive=False),
        node("n3", is_draining=True),
    ],
)


def shown(fleet: dict[str, Any], width: int) -> list[str]:
    """Lines with single spaces."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        status.show(fleet, console)
    printed = captured.get().splitlines()
    assert max(map(len, printed)) <= width
    return [" ".join(line.split()) for line in printed]


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["", ""], "smollm2 in float32, KV in bfloat16 /models/smollm2"),
        (["gguf", "gguf"], "smollm2 in float32, KV in bfloat16, gguf weights /models/smollm2"),
        (
            ["gguf", ""],
            "smollm2 in float32, KV in bfloat16, plain weights on w1, gguf weights on w0 /models/smollm2",
        ),
        (["int8", None], "smollm2 in float32, KV in bfloat16, int8 weights /models/smollm2"),
        ([None, None], "smollm2 in float32, KV in bfloat16 /models/smollm2"),
    ],
)
def test_the_weights_are_named_as_the_workers_keep_them(kinds: list[str | None], text: str) -> None:
    """None: a worker without a process, which keeps none."""
    workers = [
        missing(f"w{number}", "placing") if kind is None else worker(f"w{number}", quantization=kind)
        for number, kind in enumerate(kinds)
    ]
    assert shown(description(*workers), 160)[0] == text


@pytest.mark.parametrize("width", [80, 160])
def test_every_node_and_every_worker_has_a_row(width: int) -> None:
    lines = shown(FLEET, width)
    assert "n0 10.0.0.1 alive, head 8 CPU -" in lines
    assert "n1 10.0.0.2 alive 8 CPU, 1 prefill w0, w1" in lines
    assert "n2 10.0.0.2 gone 8 CPU -" in lines
    assert "n3 10.0.0.2 alive, draining 8 CPU -" in lines
    pid = " 4000 2 on 0-1" if width == 160 else ""
    assert f"w0 prefill ready n1{pid} 60/100 15 3 2 4 5 1" in lines
    assert f"w1 decode ready n1{pid} 100/100 0 0 0 0 0 3" in lines
    missing_pid = " - -" if width == 160 else ""
    assert f"w2 decode crash loop 58 s n1{missing_pid} 9" in lines


@pytest.mark.parametrize("width", [80, 160])
def test_what_failed_last_is_one_line_as_it_was_written(width: int) -> None:
    assert "w2: exit code 1: no [memory] ]0;" in shown(FLEET, width)


def test_paths_and_controller_are_named() -> None:
    lines = shown(FLEET, 160)
    assert lines[0] == "smollm2 in float32, KV in bfloat16 /models/smollm2"
    assert lines[1] == "3 requests in flight, 1 queued; finished: 12 disaggregated, 0 fallback, 2 local"
    assert lines[2] == "1 failed, 0 rejected, 0 aborted; 5 moved to other workers (2 given back, 3 lost)"
    assert lines[3] == "controller c0ffee00"
    alone = description(worker("w0", slot=None), nodes=[], controller={"state": "none"})
    lines = shown(alone, 160)
    assert lines[3] == "no controller"
    assert "w0 decode ready n1 4000 2 on 0-1 100/100 0 0 0 0 0 -" in lines


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cpus": []}, "2"),
        ({"threads": 0, "cpus": []}, "-"),
        ({"threads": 3, "cpus": [0, 1, 4]}, "3 on 0-1,4"),
    ],
)
def test_threads_are_shown_with_the_cpus_that_they_keep_to(fields: dict[str, Any], text: str) -> None:
    assert f"w0 decode ready n1 4000 {text} 100/100 0 0 0 0 0 1" in shown(
        description(worker("w0", **fields)), 160
    )


def test_hand_overs_tell_both_ways() -> None:
    assert "w1 from w0 shared_memory 2 1 0 3.0 100.0 10.0" in shown(FLEET, 160)
    assert "w1 from w0 shared_memory 2 1 3.0 100.0 10.0" in shown(FLEET, 80)
