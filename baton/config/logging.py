"""The configuration's section `logging`: what every process of a cluster writes to its stderr, and how."""

from typing import Literal

from baton.config.section import Section


class LoggingConfig(Section):
    """The same for gateways, controllers and workers."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The least that is written; `info` has a line for each request that is over. Of libraries that are not ours,
    warnings and errors are, whatever this says."""
    format: Literal["text", "json"] = "text"
    """`json`: an object a line, for programs that read logs."""
    log_prompts: bool = False
    """Prompts are written, too, as lines of level `info`."""
