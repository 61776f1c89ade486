"""`baton demo`: starts a small cluster, asks one question over gRPC, and shows where the time went."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from baton.config import BatonConfig
from cli.commands.generate import GeneratedAnswer, ask
from cli.console import CommandConsole
from cli.target import Target
from cluster.serve.following_gateway import Service
from cluster.serve.run import run_deployment
from cluster.serve.screen import Screen

_BAR_WIDTH = 40


def run(config: BatonConfig, prompt: str) -> int:
    """Starts the cluster, asks, shows the timeline and stops; the answer streams to the terminal as it is generated."""
    console = CommandConsole()
    screen = Screen(console)

    async def while_ready(service: Service) -> None:
        screen.line("ready", f"gRPC on {service.target}")
        console.print(f"\n[bold cyan]user[/]      {escape(prompt)}", highlight=False)
        console.print("[bold cyan]assistant[/] ", end="")
        answer = await ask(
            Target(service.target),
            _printer(console),
            messages=[("user", prompt)],
            sampling={"max_tokens": 128, "temperature": 0.0},
            mode="disaggregated",
        )
        console.print("\n")
        show_timeline(answer, console)

    run_deployment(config, screen, while_ready)
    return 0


def show_timeline(answer: GeneratedAnswer, console: Console) -> None:
    """Shows where the time of one answer went, stage by stage, and on which workers."""
    timing, usage, placement = (
        answer.completion.timing,
        answer.completion.usage,
        answer.completion.placement,
    )
    prefill, decode = placement["prefill"], placement["decode"]
    num_tokens = usage["completion_tokens"]
    stages = (
        ("queue", timing["queue_s"], f"on {prefill}"),
        ("prefill", timing["prefill_s"], f"{usage['prompt_tokens']} tokens on {prefill}"),
        (
            "transfer",
            timing["transfer_s"],
            f"{timing['transfer_bytes'] / 1e6:.2f} MB of KV cache, {prefill} -> {decode} by {timing['transport']}",
        ),
        ("decode", timing["decode_s"], f"{num_tokens} tokens on {decode}{_pace(timing)}"),
    )
    for name, seconds, what in stages:
        width = max(1, round(seconds / timing["total_s"] * _BAR_WIDTH))
        console.print(
            f"{name:<8} {seconds * 1e3:8.1f} ms  [cyan]{'█' * width:<{_BAR_WIDTH}}[/]  {what}",
            highlight=False,
            soft_wrap=True,
        )
    for transfer in timing["transfers"]:
        console.print(f"{'':<20} {_events_text(transfer)}", highlight=False, soft_wrap=True)
    console.print(
        f"{'total':<8} {timing['total_s'] * 1e3:8.1f} ms  first token after {timing['ttft_s'] * 1e3:.1f} ms, "
        f"next one {timing['handover_s'] * 1e3:.1f} ms later; mode {placement['mode']}, "
        f"attempts {placement['attempts']}\n",
        highlight=False,
        soft_wrap=True,
    )


def _events_text(transfer: dict[str, Any]) -> str:
    """What one end of a hand-over reports about it. Times of events count from the request's arrival."""
    direction = "to" if transfer["role"] == "producer" else "from"
    events = ", ".join(
        f"{event['name'].replace('_', ' ')} {event['at_s'] * 1e3:.1f} ms" for event in transfer["events"]
    )
    reason = f" ({transfer['reason']})" if transfer["reason"] else ""
    exposed = f"; exposed {transfer['exposed_s'] * 1e3:.1f} ms" if transfer["exposed_s"] else ""
    who = f"{transfer['worker']} {direction} {transfer['peer']}, attempt {transfer['attempt']}"
    return f"{who}: {events}{reason}{exposed}"


def _pace(timing: dict[str, Any]) -> str:
    latencies = sorted(timing["itl_s"])
    return f", {1 / latencies[len(latencies) // 2]:.0f} tokens/s" if latencies else ""


def _printer(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
