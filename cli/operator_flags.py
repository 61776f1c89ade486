"""The commands of whoever runs a fleet, and their flags; what they mean, their modules in cli/commands/ know."""

import argparse
from pathlib import Path

from cli.target_flags import add_target_flags


def add_operators_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", default_target: str
) -> None:
    status = commands.add_parser("status", help="show nodes and workers, their KV blocks and requests")
    add_target_flags(status, default_target)
    status.add_argument("--json", action="store_true", help="print one JSON object")

    top = commands.add_parser("top", help="watch the fleet live, until q or Ctrl-C")
    add_target_flags(top, default_target)
    top.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks; default 1"
    )

    drain = commands.add_parser("drain", help="take a worker out for good; what it has goes on elsewhere")
    role = commands.add_parser("role", help="give a worker another role, without a restart")
    rollout = commands.add_parser("rollout", help="restart workers, one after the other, under load")
    for order in (drain, role, rollout):
        add_target_flags(order, default_target)
        order.add_argument("--json", action="store_true", help="print one JSON object once it is done")
    _add_drain_flags(drain)
    role.add_argument("worker", metavar="WORKER", help="its name in `baton status`")
    rollout.add_argument("workers", nargs="*", metavar="WORKER", help="default: all")
    role.add_argument("role", choices=("prefill", "decode"), help="what it is to become")
    _add_probe(commands)


def _add_drain_flags(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("worker", nargs="?", metavar="WORKER", help="its name in `baton status`")
    drain.add_argument(
        "--node",
        metavar="ADDRESS",
        help="in place of WORKER: all that is on this node; nothing is placed there again, and what was there begins "
        "anew elsewhere. Its address, or its name in `baton status`",
    )
    drain.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help="with --node: what that may take; default 60",
    )
    drain.add_argument(
        "--fleet-address",
        metavar="HOST:PORT",
        help="with --node: ask the control server of a `baton fleet`, with the cluster's secret in place of a key",
    )
    drain.add_argument(
        "--secret-file",
        metavar="FILE",
        help="with --fleet-address: as network.secret_file of the configuration",
    )


def _add_probe(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    probe = commands.add_parser("probe", help="check the health of one process: exit code 0 if it is well")
    probe.add_argument(
        "url",
        metavar="URL",
        help="http(s)://HOST:PORT/ready or /health of a gateway, fleet://HOST:PORT of a `baton fleet`, or "
        "tcp://HOST:PORT of anything that listens, such as a node of Ray",
    )
    probe.add_argument("--timeout", type=_seconds, default=3.0, metavar="S", help="default 3")
    probe.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="trust these authorities; default: anybody"
    )
    probe.add_argument("--tls-cert", type=Path, metavar="FILE", help="show this certificate (mTLS)")
    probe.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    probe.add_argument(
        "--secret-file", metavar="FILE", help="with fleet: as network.secret_file of the configuration"
    )


def _seconds(text: str) -> float:
    """More than none, and less than a day; argparse names the flag."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= 86_400.0:
        raise argparse.ArgumentTypeError(f"got {text!r}; seconds, more than 0 and at most 86400")
    return seconds
