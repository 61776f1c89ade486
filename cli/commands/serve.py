"""`baton serve`: a deployment that stays until Ctrl-C, and says how to talk to it."""

from rich.console import Console

from baton.config import BatonConfig
from baton.system.logs import write_logs
from cli.announcement import serving
from cluster.serve.deployment import run_deployment
from cluster.serve.screen import Screen


def run(config: BatonConfig, as_json: bool) -> int:
    """Serves until SIGINT or SIGTERM. Progress goes to stderr; stdout gets one JSON line when ready, if asked for."""
    write_logs(config.logging, component="gateway", fleet=config.cluster.name)
    screen = Screen(Console(stderr=True))

    run_deployment(config, screen, serving(screen, as_json))
    screen.line("stopped", "everything it started is gone")
    return 0
