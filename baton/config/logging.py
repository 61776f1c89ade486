"""The configuration's section `logging`: what every process of a cluster writes to stderr, and in which format."""

from typing import Literal, Self

from pydantic import model_validator

from baton.config.section import Section


class LoggingConfig(Section):
    """Log settings for gateways, controllers and workers alike."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level that is written; `info` has one line for each finished request. Third-party libraries always log
    warnings and errors only."""
    format: Literal["text", "json"] = "text"
    """`json`: one object per line, for programs that read logs."""
    log_prompts: bool = False
    """Also log prompts, at level `info`; needs `level` `info` or `debug`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.log_prompts and self.level not in ("info", "debug"):
            raise ValueError(
                f"log_prompts needs level 'info' or 'debug', not '{self.level}', since prompts are logged at level info"
            )
        return self
