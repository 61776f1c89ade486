"""`baton gateway`: adds one more gateway to a running fleet, until Ctrl-C.

The fleet then continues without it.
"""

from baton.config import BatonConfig
from baton.system.logs import write_logs
from cli.announcement import serving
from cli.console import CommandConsole
from cluster.serve.joining import run_gateway
from cluster.serve.screen import Screen


def run(config: BatonConfig, as_json: bool) -> int:
    """Serves until SIGINT or SIGTERM. Progress goes to stderr; with `as_json`, stdout gets one JSON line when ready."""
    write_logs(config.logging, component="gateway", fleet=config.cluster.name)
    screen = Screen(CommandConsole(stderr=True))
    run_gateway(config, screen, serving(screen, as_json))
    screen.line("stopped", "the fleet continues without this gateway")
    return 0
