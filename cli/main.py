"""The `baton` command: parses flags, runs a subcommand, and turns errors into exit codes.

Subcommands are in cli/commands/, and are imported only when they run. So `baton --help`, and commands that only
call a gateway, never wait for Ray or torch. Exit codes: 0 done, 1 refused (by the server, the cluster or a file's
content), 2 usage; further ones are below.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.clock import SystemClock
from baton.config import BatonConfig, NetworkConfig, Section, merge
from baton.errors import BatonError, ClusterError, ConfigError
from baton.system.home import ensure_home, expanded
from baton.system.hosts import is_address
from baton.system.watched import Watched
from baton.version import baton_version
from cli.command_flags import (
    add_command,
    add_generate_flags,
    add_operators_commands,
    add_target_flags,
    add_trace_flags,
)
from cli.flags import (
    FLEET_FLAGS,
    GATEWAY_FLAGS,
    MODELS_FLAGS,
    SERVE_FLAGS,
    add_flags,
    for_one_fleet,
    overrides_from,
)
from cli.output import (
    OutputError,
    checked_output,
    discard_output,
    replace_closed_streams,
    replace_unencodable,
)
from cli.own_packages import foreign_module

if TYPE_CHECKING:
    from cli.target import Target

DONE, REFUSED, USAGE = 0, 1, 2
INTERRUPTED = 130
"""As in cli/__main__.py, which has the number before it imports anything."""
READER_LEFT = 141
"""Exit code if the reader of stdout has ended. A shell reports the same code for a process that SIGPIPE ended."""
UNWRITABLE = 74
"""Exit code if stdout cannot be written, for example because the disk is full (EX_IOERR of sysexits.h)."""

KEY_ADVICE = "pass an API key with --api-key-file, or in the environment variable BATON_API_KEY"

_DEFAULTS = BatonConfig()
DEFAULT_TARGET = f"{_DEFAULTS.gateway.host}:{_DEFAULTS.gateway.grpc_port}"

# One prefill and one decode worker for the smallest real model, on a free port.
_DEMO: dict[str, Any] = {
    "model": {"path": "smollm2"},
    "engine": {"kv_cache_memory_mib": 256},
    "gateway": {"grpc_port": 0, "http_port": None},
    "cluster": {"prefill": 1, "decode": 1},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; error messages go to stderr."""
    replace_closed_streams()
    replace_unencodable()
    ensure_home(os.environ)
    if (wrong := _invalid_utf_8(sys.argv[1:] if arguments is None else arguments)) is not None:
        print(f"baton: an argument is not valid UTF-8: {wrong!a}", file=sys.stderr)
        return USAGE
    command = "baton"
    try:
        with checked_output():
            options = build_parser().parse_args(arguments)
            command = f"baton {options.command}"
            # gRPC reads this variable at its first use. Without it, gRPC logs a line for each TLS handshake that
            # fails.
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
            code = _COMMANDS.get(options.command, _at_gateway)(options)
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        discard_output()
        return READER_LEFT
    except OutputError as error:
        discard_output()
        return _fail(command, error, UNWRITABLE)
    except ConfigError as error:
        return _fail(command, error, USAGE)
    except BatonError as error:
        return _fail(command, error, REFUSED)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _invalid_utf_8(arguments: Sequence[str]) -> str | None:
    """The first argument that is not valid UTF-8; None if all are valid. Python replaces the invalid bytes of an
    argument by lone surrogates, which UTF-8 cannot encode."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            return argument
    return None


def _fail(command: str, error: object, code: int) -> int:
    # In one piece, since other processes may write to stderr, too.
    sys.stderr.write(f"{command}: {error}\n")
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description="Serves language models with separate prefill and decode workers."
    )
    parser.add_argument("--version", action="version", version=f"baton {baton_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    once_ready = "print one JSON object to stdout once ready"
    for name, flags, summary, json_help in (
        ("serve", SERVE_FLAGS, "start workers and a gateway, and serve until Ctrl-C", once_ready),
        (
            "fleet",
            FLEET_FLAGS,
            "start workers without a gateway, for gateways elsewhere to join, until Ctrl-C",
            once_ready,
        ),
        ("gateway", GATEWAY_FLAGS, "start another gateway for a running fleet, until Ctrl-C", once_ready),
        (
            "models",
            MODELS_FLAGS,
            "list the models that are cached on this machine, and whether each would load here",
            "print one JSON list",
        ),
    ):
        server = add_command(commands, name, summary)
        server.add_argument(
            "config", nargs="?", type=Path, metavar="CONFIG", help="YAML file; flags override it"
        )
        server.add_argument("--json", action="store_true", help=json_help)
        add_flags(server, flags)

    generate = add_command(commands, "generate", "send one prompt and stream the answer")
    add_target_flags(generate, DEFAULT_TARGET)
    add_generate_flags(generate)

    add_operators_commands(commands, DEFAULT_TARGET)

    key = add_command(commands, "key", "make an API key and its configuration entry")
    key.add_argument("name", metavar="NAME", help="name of the caller")
    grants = key.add_mutually_exclusive_group()
    grants.add_argument(
        "--admin", action="store_true", help="grant all scopes: generate, observe and administer"
    )
    grants.add_argument(
        "--scope",
        action="append",
        choices=("generate", "observe", "administer"),
        help="scope to grant; repeat the flag for several; default generate",
    )
    key.add_argument("--json", action="store_true", help="print key and entry as one JSON object")

    demo = add_command(
        commands, "demo", "start a small cluster, ask it one question, and show where the time went"
    )
    demo.add_argument(
        "prompt", nargs="?", metavar="PROMPT", default="Why is the sky blue?", help="default %(default)s"
    )

    add_trace_flags(add_command(commands, "trace", "draw the steps that workers recorded with --trace-dir"))
    return parser


def with_absolute_paths(config: BatonConfig, here: Path) -> BatonConfig:
    """Resolves paths against the folder of this command, since workers may run in another folder."""
    changed: dict[str, Section] = {}
    if (trace_dir := config.engine.trace_dir) is not None:
        changed["engine"] = config.engine.model_copy(update={"trace_dir": str(here / expanded(trace_dir))})
    draft_model = config.speculation.draft_model
    if draft_model is not None and (here / draft_model).exists():  # otherwise it is the name of a model
        path = str(here / draft_model)
        changed["speculation"] = config.speculation.model_copy(update={"draft_model": path})
    return config.model_copy(update=changed)


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more; change to another one") from None


def _serve(options: argparse.Namespace) -> int:
    config = with_absolute_paths(_configuration(options), _here())
    _prepare(config)
    from cli.commands import servers

    return servers.serve(config, as_json=options.json)


def _fleet(options: argparse.Namespace) -> int:
    path, here, given = options.config, _here(), set[str]()

    def read() -> BatonConfig:
        nonlocal given
        config = with_absolute_paths(_configuration(options), here)
        if lost := sorted(given - config.cluster.model_fields_set):
            raise ConfigError(
                f"{path} no longer has cluster.{lost[0]}; write this key again, perhaps with its default"
            )
        given = config.cluster.model_fields_set & {"prefill", "decode"}
        return config

    watched = Watched(() if path is None else (path,), read, SystemClock())
    config = watched.current()
    _prepare(config)
    from cli.commands import servers

    return servers.serve_fleet(config, as_json=options.json, reread=watched.current)


def _gateway(options: argparse.Namespace) -> int:
    config = _configuration(options)
    _prepare(config)
    from cli.commands import servers

    return servers.serve_gateway(config, as_json=options.json)


def _models(options: argparse.Namespace) -> int:
    _do_without_torch()
    from cli.commands import models

    return models.run(_configuration(options), as_json=options.json)


def _configuration(options: argparse.Namespace) -> BatonConfig:
    overrides = for_one_fleet(overrides_from(options))
    if options.config is not None:
        return BatonConfig.from_yaml(options.config, overrides)
    return BatonConfig.from_mapping(merge({}, overrides), "flags")


def _network(options: argparse.Namespace) -> NetworkConfig:
    """The configuration for a command that calls a fleet's control server with the cluster's secret."""
    overrides = {"network": {"secret_file": options.secret_file}}
    return BatonConfig.from_mapping(merge({}, overrides), "flags").network


def _drain(options: argparse.Namespace) -> int:
    if (options.worker is None) == (options.node is None):
        raise ConfigError("give either WORKER or --node ADDRESS")
    if options.node is None and (options.timeout, options.fleet_address, options.secret_file) != (None,) * 3:
        raise ConfigError("--timeout, --fleet-address and --secret-file need --node")
    if options.fleet_address is None:
        if options.secret_file is not None:
            raise ConfigError("--secret-file needs --fleet-address; a gateway takes an API key instead")
        return _at_gateway(options)
    if not is_address(options.fleet_address):
        raise ConfigError(
            f"--fleet-address: got {options.fleet_address!r}; use HOST:PORT, as printed by `baton fleet`"
        )
    if options.target != DEFAULT_TARGET:
        raise ConfigError(
            "--target and --fleet-address both name the process to ask; give only one of the two flags"
        )
    for flag in ("--api-key", "--api-key-file", "--tls", "--tls-ca", "--tls-cert", "--tls-key"):
        if getattr(options, flag[2:].replace("-", "_")) not in (None, False):
            raise ConfigError(
                f"{flag} is only for a gateway; a control server (--fleet-address) takes the cluster's secret instead"
            )
    from cli.commands import drain_node

    return drain_node.at_control_server(options.fleet_address, options, _network(options))


def _probe(options: argparse.Namespace) -> int:
    from cli.commands import probe

    tls = probe.TlsFiles(options.tls_ca, options.tls_cert, options.tls_key)
    return probe.run(options.url, options.timeout, tls, _network(options))


def _key(options: argparse.Namespace) -> int:
    from cli.commands import key

    scopes = ["generate", "administer"] if options.admin else options.scope or ["generate"]
    return key.run(options.name, scopes, as_json=options.json)


def _demo(options: argparse.Namespace) -> int:
    config = BatonConfig.from_mapping(_DEMO)
    _prepare(config)
    from cli.commands import demo

    return demo.run(config, options.prompt)


def _trace(options: argparse.Namespace) -> int:
    from cli.commands import trace

    return trace.run(options)


def _do_without_torch() -> None:
    """Hides torch from libraries that read tokenizers: importing it would cost seconds and 250 MiB."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # "absent", see the import system
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else they warn that torch is missing


def _prepare(config: BatonConfig) -> None:
    """Prepares commands that start or join a fleet: this process computes nothing, but may need Ray."""
    if (problem := foreign_module()) is not None:  # workers would end with a traceback, and be started again
        raise ClusterError(problem)
    _do_without_torch()
    if config.cluster.ray_address == "none" or config.cluster.fleet_address is not None:
        return
    _here()  # Ray's processes start in this folder
    from cluster.on_ray.session import prepare_environment

    prepare_environment(config.cluster, os.environ, Path.home())


def _at_gateway(options: argparse.Namespace) -> int:
    """Runs a command that calls a running gateway. The gateway may refuse the call."""
    from cli.target import advice_on_proxy, target_from
    from gateway import GatewayError

    try:
        return _runner_of(options)(target_from(options, os.environ), options)
    except GatewayError as error:
        advice = [error.advice] if error.advice else []
        if error.code == "UNAUTHENTICATED":
            advice.append(KEY_ADVICE)
        if error.code == "UNAVAILABLE" and not error.details.reason:  # no gateway made this error
            advice += advice_on_proxy(options.target, os.environ)
        for line in (error, *advice):
            _fail(f"baton {options.command}", line, REFUSED)
        return REFUSED


def _runner_of(options: argparse.Namespace) -> "Callable[[Target, argparse.Namespace], int]":
    """The function that runs this command; imports no other command."""
    if options.command == "generate":
        from cli.commands.generate import run
    elif options.command == "status":
        from cli.commands.status import run
    elif options.command == "top":
        from cli.commands.top import run
    elif options.command == "drain" and options.node is not None:
        from cli.commands.drain_node import at_gateway as run
    else:
        from cli.commands.operators import run
    return run


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve,
    "fleet": _fleet,
    "gateway": _gateway,
    "models": _models,
    "drain": _drain,
    "probe": _probe,
    "key": _key,
    "demo": _demo,
    "trace": _trace,
}
"""`_at_gateway` runs every command that is not in this table."""


if __name__ == "__main__":
    sys.exit(main())
