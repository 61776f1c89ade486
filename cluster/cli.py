"""The `baton` command: parses, dispatches, and turns errors into exit codes; each subcommand is a module of its own.

Exit codes: 0 done, 1 the server (or the cluster, or what a file holds) said no, 2 usage. Subcommands are imported only
when asked for, so `baton --help` and whatever only asks a gateway never wait for Ray or torch.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.config import BatonConfig
from baton.errors import BatonError, ConfigError
from cluster.flags import add_serve_flags, overrides_from

DONE, REFUSED, USAGE = 0, 1, 2
INTERRUPTED = 130

_DEFAULTS = BatonConfig()
DEFAULT_TARGET = f"{_DEFAULTS.gateway.host}:{_DEFAULTS.gateway.grpc_port}"

# One prefill and one decode worker for the smallest real model, on a free port.
_DEMO: dict[str, Any] = {
    "model": {"path": "smollm2"},
    "engine": {"kv_cache_memory_mib": 256},
    "gateway": {"grpc_port": 0},
    "cluster": {"prefill": 1, "decode": 1},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; messages about what went wrong go to stderr."""
    options = build_parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except ConfigError as error:
        return _fail(options, error, USAGE)
    except BatonError as error:
        return _fail(options, error, REFUSED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(options: argparse.Namespace, error: Exception, code: int) -> int:
    print(f"baton {options.command}: {error}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description="Language models, served by prefill and decode workers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start workers and gateway, and serve until Ctrl-C")
    serve.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML file; flags win over it")
    serve.add_argument("--json", action="store_true", help="print one JSON object to stdout once ready")
    add_serve_flags(serve)

    generate = commands.add_parser("generate", help="send one prompt and stream the answer")
    _add_target(generate)
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default %(default)s")
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0, which is greedy"
    )
    generate.add_argument("--seed", type=int, metavar="S", help="same seed, same answer")
    generate.add_argument("--raw", action="store_true", help="send the text as it is, without chat template")
    generate.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever comes")
    grammar = generate.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="SCHEMA", help="let the answer match a JSON schema")
    grammar.add_argument("--regex", metavar="REGEX", help="let the answer match a regular expression")
    generate.add_argument("--mode", choices=("disaggregated", "local"), help="insist on how it is served")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")

    _add_operators_commands(commands)

    demo = commands.add_parser(
        "demo", help="start a small cluster, ask it one question, show where the time went"
    )
    demo.add_argument("prompt", nargs="?", metavar="PROMPT", default="Why is the sky blue?")

    trace = commands.add_parser("trace", help="draw the steps that workers wrote with --trace-dir")
    _add_trace_flags(trace)
    return parser


def _add_operators_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = commands.add_parser("status", help="show nodes and workers, their KV blocks and requests")
    _add_target(status)
    status.add_argument("--json", action="store_true", help="print one JSON object")

    top = commands.add_parser("top", help="watch the fleet live, until q or Ctrl-C")
    _add_target(top)
    top.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks; default 1"
    )

    drain = commands.add_parser("drain", help="take a worker out for good; what it has goes on elsewhere")
    role = commands.add_parser("role", help="give a worker another role, without a restart")
    rollout = commands.add_parser("rollout", help="restart workers, one after the other, under load")
    for order in (drain, role, rollout):
        _add_target(order)
        order.add_argument("--json", action="store_true", help="print one JSON object once it is done")
    for order in (drain, role):
        order.add_argument("worker", metavar="WORKER", help="its name in `baton status`")
    rollout.add_argument("workers", nargs="*", metavar="WORKER", help="default: all")
    role.add_argument("role", choices=("prefill", "decode"), help="what it is to become")


def _seconds(text: str) -> float:
    """More than none, and less than a day; argparse names the flag."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= 86_400.0:
        raise argparse.ArgumentTypeError(f"got {text!r}; seconds, more than 0 and at most 86400")
    return seconds


def with_absolute_paths(config: BatonConfig, here: Path) -> BatonConfig:
    """Workers need not run in the folder that this command runs in."""
    if config.engine.trace_dir is None:
        return config
    trace_dir = str(here / config.engine.trace_dir)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"trace_dir": trace_dir})})


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="default %(default)s")


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="one worker's steps each; panels share one axis of time",
    )
    parser.add_argument("--svg", type=Path, metavar="OUT.svg", help="draw them there too")
    parser.add_argument(
        "--steps",
        metavar="A:B",
        help="of the first file, both ends included; others: what they did meanwhile",
    )
    parser.add_argument("--requests", metavar="ID,...", help="only requests whose ids begin so")
    parser.add_argument(
        "--max-columns",
        type=int,
        default=200,
        metavar="N",
        help="leave out what comes after; default %(default)s",
    )


def _serve(options: argparse.Namespace) -> int:
    overrides = overrides_from(options)
    if options.config is not None:
        config = BatonConfig.from_yaml(options.config, overrides)
    else:
        config = BatonConfig.from_mapping(overrides, "baton serve")
    config = with_absolute_paths(config, Path.cwd())
    _prepare_ray(config)
    from cluster.commands import serve

    return serve.run(config, as_json=options.json)


def _generate(options: argparse.Namespace) -> int:
    from cluster.commands import generate

    return generate.run(options)


def _status(options: argparse.Namespace) -> int:
    from cluster.commands import status

    return status.run(options.target, as_json=options.json)


def _top(options: argparse.Namespace) -> int:
    from cluster.commands import top

    return top.run(options.target, options.interval)


def _drain(options: argparse.Namespace) -> int:
    from cluster.commands import drain

    return drain.run(options.target, options.worker, as_json=options.json)


def _role(options: argparse.Namespace) -> int:
    from cluster.commands import role

    return role.run(options.target, options.worker, options.role, as_json=options.json)


def _rollout(options: argparse.Namespace) -> int:
    from cluster.commands import rollout

    return rollout.run(options.target, options.workers, as_json=options.json)


def _demo(options: argparse.Namespace) -> int:
    config = BatonConfig.from_mapping(_DEMO)
    _prepare_ray(config)
    from cluster.commands import demo

    return demo.run(config, options.prompt)


def _trace(options: argparse.Namespace) -> int:
    from cluster.commands import trace

    try:
        return trace.run(options)
    except OSError as error:  # a file that is not there, or a place where none can be written
        return _fail(options, error, USAGE)


def _prepare_ray(config: BatonConfig) -> None:
    if config.cluster.ray_address == "none":
        return
    from cluster.on_ray.session import prepare_environment

    prepare_environment(config.cluster, os.environ, Path.home())


def _of_gateway(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that asks a running gateway, which may refuse."""

    def run(options: argparse.Namespace) -> int:
        from gateway import GatewayError

        try:
            return command(options)
        except GatewayError as error:
            return _fail(options, error, REFUSED)

    return run


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve,
    "generate": _of_gateway(_generate),
    "status": _of_gateway(_status),
    "top": _of_gateway(_top),
    "drain": _of_gateway(_drain),
    "role": _of_gateway(_role),
    "rollout": _of_gateway(_rollout),
    "demo": _demo,
    "trace": _trace,
}


if __name__ == "__main__":
    sys.exit(main())
