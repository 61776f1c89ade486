"""What is shown away from a terminal: plain lines, each once."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from baton.kv import WorkerRef
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole
from cluster.serve.screen import Screen, workers_text


def plain_screen() -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=False, width=200)), out


def test_a_stage_is_one_line_with_its_outcome() -> None:
    screen, out = plain_screen()
    with screen.stage("model", "looking for smollm2") as done:
        done("found it")
    assert out.getvalue().startswith("model     found it ")
    assert out.getvalue().endswith(" s\n")


def test_brackets_are_printed_as_they_are() -> None:
    screen, out = plain_screen()
    screen.line("ready", "gRPC on [fd00::1]:50051")
    with screen.stage("model", "looking for /data/[prod]/llama") as done:
        done("found /data/[prod]/llama")
    with screen.bar() as report:
        report("downloading a/[b]", 0.5)
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert lines[0] == "ready     gRPC on [fd00::1]:50051"
    assert lines[1].startswith("model     found /data/[prod]/llama ")
    assert lines[2] == "downloading a/[b]"


def test_a_stage_on_a_terminal_shows_how_far_its_parts_are() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=100))
    with screen.stage("workers", "starting 2") as stage:
        stage.report("d0", StartProgress("recording CUDA graphs", 1, 2))
        stage.report("p0", StartProgress("loading weights", 1, 4))
        screen.console.print("")  # any output redraws the stage
    text = out.getvalue()
    assert "recording CUDA graphs" in text
    assert "50%" in text
    assert "loading weights" in text
    assert "25%" in text


def test_a_bar_is_one_line_per_text() -> None:
    screen, out = plain_screen()
    with screen.bar() as report:
        for fraction in (0.0, 0.5, 1.0):
            report("downloading", fraction)
        report("converting", 0.0)
    assert [line.strip() for line in out.getvalue().splitlines()] == ["downloading", "converting"]


def test_a_bar_on_a_terminal_shows_how_far() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=100))
    with screen.bar() as report:
        report("downloading tiny", 0.25)
    assert "downloading tiny" in out.getvalue()
    assert "25%" in out.getvalue()


def test_what_a_stage_notes_stays_and_what_it_says_only_moves() -> None:
    screen, out = plain_screen()
    with screen.stage("rollout", "one worker after the other") as stage:
        stage.say("w0 draining")
        stage.note("w0 serves anew")
        stage("all serve")
    first, last = out.getvalue().splitlines()
    assert first == "          w0 serves anew"
    assert last.startswith("rollout   all serve ")


def test_what_a_stage_says_is_seen_on_a_terminal() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=100))
    with screen.stage("drain", "w0 leaves") as stage:
        stage.say("draining, 2 requests")
        screen.console.print("")  # any output redraws the stage
    assert "(draining, 2 requests)" in out.getvalue()


@pytest.mark.parametrize(
    ("num_threads", "cpus", "text"),
    [
        (1, (5,), "w0 (decode, pid 7, 1 thread on CPUs 5)"),
        (4, (0, 1, 2, 3), "w0 (decode, pid 7, 4 threads on CPUs 0-3)"),
        (2, (), "w0 (decode, pid 7, 2 threads)"),
        (0, (), "w0 (decode, pid 7)"),
    ],
)
def test_workers_are_named_with_their_part_of_the_machine(
    num_threads: int, cpus: tuple[int, ...], text: str
) -> None:
    ref = WorkerRef("w0", "incarnation", ("tcp://127.0.0.1:1",), 16)
    endpoint = WorkerEndpoint(ref, WorkerRole.DECODE, "", "here", 7, num_threads=num_threads, cpus=cpus)
    assert workers_text([endpoint]) == text
    kept = replace(endpoint, quantization="int8")
    assert workers_text([kept, endpoint]) == f"{text.removesuffix(')')}, int8 weights), {text}"
