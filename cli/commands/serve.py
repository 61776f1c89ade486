"""`baton serve`: runs a deployment until Ctrl-C, and shows how to use it."""

from baton.config import BatonConfig
from baton.system.logs import write_logs
from cli.announcement import serving
from cli.console import CommandConsole
from cluster.serve.deployment import run_deployment
from cluster.serve.screen import Screen


def run(config: BatonConfig, as_json: bool) -> int:
    """Serves until SIGINT or SIGTERM. Progress goes to stderr; with `as_json`, stdout gets one JSON line when ready."""
    write_logs(config.logging, component="gateway", fleet=config.cluster.name)
    screen = Screen(CommandConsole(stderr=True))

    run_deployment(config, screen, serving(screen, as_json))
    screen.line("stopped", "all processes of this deployment have ended")
    return 0
