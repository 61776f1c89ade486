"""The flags of `baton generate`, of the operators' commands and of `baton trace`; cli/commands/ implements them."""

import argparse
from functools import partial
from pathlib import Path
from typing import TypeAlias

from baton.fleet import MAX_DRAIN_NODE_S
from baton.sampling import MAX_SEED

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    """Adds a command. The list of commands shows `summary`, and the command's own help begins with it."""
    return commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def add_target_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the flags that choose the gateway, the credentials for it, and how to check its identity."""
    parser.add_argument(
        "--target", default=default, metavar="HOST:PORT", help="gateway to call; default %(default)s"
    )
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the API key")
    key.add_argument(
        "--api-key",
        metavar="KEY",
        help="the API key itself, visible to other users of this machine; default $BATON_API_KEY",
    )
    parser.add_argument("--tls", action="store_true", help="use TLS; implied by the flags below")
    _add_tls_files(parser, "trust only these certificate authorities")


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the text to send: as a user's turn, or unchanged with --raw"
    )
    parser.add_argument("--max-tokens", type=_number, default=256, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--max-model-len",
        type=_number,
        metavar="N",
        help="end at N tokens of prompt and answer together; default: the model's limit",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0, which is greedy"
    )
    parser.add_argument(
        "--seed",
        type=partial(_number, least=0, most=MAX_SEED),
        metavar="S",
        help="the same seed gives the same answer",
    )
    parser.add_argument("--raw", action="store_true", help="send the text unchanged, without a chat template")
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ignore end-of-sequence tokens: generate all --max-tokens tokens",
    )
    parser.add_argument(
        "--skip-reading-prefix-cache",
        action="store_true",
        help="compute the whole prompt, even if a prefix cache has a part of it",
    )
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="SCHEMA", help="constrain the answer to a JSON schema")
    grammar.add_argument("--regex", metavar="REGEX", help="constrain the answer to a regular expression")
    parser.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="JSON file of tools in OpenAI's format; the answer may call them",
    )
    parser.add_argument(
        "--tool-choice", metavar="CHOICE", help="none, auto (default), required, or the name of a tool"
    )
    parser.add_argument(
        "--mode", choices=("disaggregated", "local"), help="require this way of serving the prompt"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")


def add_operators_commands(commands: Commands, default_target: str) -> None:
    status = add_command(commands, "status", "show nodes and workers, with their KV blocks and requests")
    add_target_flags(status, default_target)
    status.add_argument("--json", action="store_true", help="print one JSON object")

    top = add_command(commands, "top", "watch the fleet live, until q or Ctrl-C")
    add_target_flags(top, default_target)
    top.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two updates; default 1"
    )

    drain = add_command(commands, "drain", "remove a worker for good; its requests continue on other workers")
    role = add_command(commands, "role", "change a worker's role, without a restart")
    rollout = add_command(commands, "rollout", "restart workers one after the other, under load")
    flush_cache = add_command(commands, "flush-cache", "empty the prefix caches of workers")
    for command in (drain, role, rollout, flush_cache):
        add_target_flags(command, default_target)
        command.add_argument(
            "--json", action="store_true", help="print one JSON object when the command is done"
        )
    _add_drain_flags(drain)
    role.add_argument("worker", metavar="WORKER", help="name of the worker in `baton status`")
    rollout.add_argument("workers", nargs="*", metavar="WORKER", help="default: all")
    role.add_argument("role", choices=("prefill", "decode"), help="its new role")
    flush_cache.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="WORKER",
        help="only this worker; repeat the flag for several",
    )
    flush_cache.add_argument(
        "--force",
        action="store_true",
        help="flush even while blocks are in use; running requests are preempted, and compute their KV again",
    )
    _add_probe(commands)


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `baton trace`, which only reads files."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="step trace of one worker; several files share one time axis",
    )
    parser.add_argument(
        "--steps",
        metavar="A:B",
        help="steps of the first file, both ends included; other files show the same period",
    )
    parser.add_argument(
        "--requests", metavar="ID,...", help="only requests whose ids start with one of these texts"
    )
    parser.add_argument(
        "--max-columns",
        type=int,
        default=200,
        metavar="N",
        help="largest number of columns to draw; later columns are left out; default %(default)s",
    )


def _add_drain_flags(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("worker", nargs="?", metavar="WORKER", help="name of the worker in `baton status`")
    drain.add_argument(
        "--node",
        metavar="ADDRESS",
        help="instead of WORKER: drain this node; use its address, or its name in `baton status`. Its workers restart "
        "on other nodes, and the node gets no new workers",
    )
    drain.add_argument(
        "--timeout",
        type=partial(_seconds, at_most=MAX_DRAIN_NODE_S),
        metavar="S",
        help=f"with --node: how long the drain may take, at most {MAX_DRAIN_NODE_S:g}; default 60",
    )
    drain.add_argument(
        "--fleet-address",
        metavar="HOST:PORT",
        help="with --node: ask the control server of a `baton fleet`, with the cluster's secret in place of a key",
    )
    drain.add_argument(
        "--secret-file",
        metavar="FILE",
        help="with --fleet-address: like network.secret_file in the configuration",
    )


def _add_probe(commands: Commands) -> None:
    probe = add_command(commands, "probe", "check the health of one process: exit code 0 if it is healthy")
    probe.add_argument(
        "url",
        metavar="URL",
        help="http(s)://HOST:PORT/ready or /health of a gateway, fleet://HOST:PORT of a `baton fleet`, "
        "or tcp://HOST:PORT of any other listener, such as a Ray node",
    )
    probe.add_argument("--timeout", type=_seconds, default=3.0, metavar="S", help="default 3")
    _add_tls_files(probe, "check the server's certificate against these CAs; default: do not check")
    probe.add_argument(
        "--secret-file",
        metavar="FILE",
        help="with a fleet:// URL: like network.secret_file in the configuration",
    )


def _add_tls_files(parser: argparse.ArgumentParser, ca_help: str) -> None:
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help=ca_help)
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="present this certificate (mTLS)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate")


def _seconds(text: str, at_most: float = 86_400.0) -> float:
    """Parses a number of seconds, which must be above 0 and at most `at_most` (by default, a day). In errors, argparse
    adds the flag's name."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= at_most:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; must be a number of seconds, more than 0 and at most {at_most:g}"
        )
    return seconds


def _number(text: str, least: int = 1, most: int = 2**32 - 1) -> int:
    """Parses a number. The default limits suit any field of the gateway's messages. Argparse adds the flag to
    errors."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"got {text[:30]!r}; must be a number from {least} to {most}")
    return int(text)
