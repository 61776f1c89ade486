"""read_sampling_defaults: the sampling settings that a model folder names for requests without their own."""

import logging
from pathlib import Path
from typing import Any

from baton.errors import InvalidRequest, ModelError
from baton.sampling import MODEL_DEFAULTS, SamplingParams
from engine.model_config import read_json

logger = logging.getLogger(__name__)

_WITHOUT_A_FILE = SamplingParams()


def read_sampling_defaults(folder: Path) -> SamplingParams:
    """Reads the settings of `MODEL_DEFAULTS`, and no others. ModelError names a value that no request may have.

    As in vLLM, `do_sample` is ignored, and `top_k: -1` means every token, like 0 in transformers.
    """
    file = folder / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    given = {name: value for name in MODEL_DEFAULTS if (value := config.get(name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    defaults = {name: _checked(file, name, value) for name, value in given.items()}
    if defaults:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        logger.info("sampling defaults of generation_config.json: %s", shown)
    return SamplingParams(**defaults)


def _checked(file: Path, name: str, value: Any) -> Any:
    kind = type(getattr(_WITHOUT_A_FILE, name))
    try:
        if type(value) not in (kind, int):
            raise InvalidRequest(name, f"must be {_KINDS[kind]}, got {value!r:.80}")
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        raise ModelError(
            f"{file}: {name} {error.problem}; correct the file, or set gateway.sampling_defaults: openai"
        ) from None
    return kind(value)


_KINDS = {int: "an integer", float: "a number"}
