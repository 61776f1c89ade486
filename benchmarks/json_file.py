"""save_json: writes the figures of a benchmark; knows no benchmark."""

import json
from pathlib import Path


def save_json(path: Path, figures: object) -> None:
    """Writes `figures` as JSON. Creates the folder if necessary, so that a long measurement is not lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
