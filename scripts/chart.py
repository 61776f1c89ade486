"""Writes the generated files of the chart: python -m scripts.chart

README.md comes from values.yaml, the schema of Baton's configuration from its classes, Ray's version from the lock, and
the dashboard from scripts/dashboard.py. In the schema of the chart's values, the keys that are required follow from the
other contents of the schema.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from baton.config import BatonConfig
from scripts.dashboard import dashboard

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "baton"
VALUES, SCHEMA, README = CHART / "values.yaml", CHART / "values.schema.json", CHART / "README.md"
RAY_VERSION, DASHBOARD = CHART / "files" / "ray_version", CHART / "files" / "dashboard.json"

_HEADING = re.compile(r"# ---- (.+?) -+$")

_HEAD = """# Baton's Helm chart

Serves a large language model with prefill and decode on separate workers, which a RayCluster of the
[KubeRay](https://ray-project.github.io/kuberay/) operator (1.6 or newer) hosts.

```sh
helm install my-model helm/baton --namespace my-model --create-namespace --values my-values.yaml
```

[docs/kubernetes.md](../../docs/kubernetes.md) describes how to get from an empty cluster to an answer, how to
upgrade, drain and scale, and common problems. `ci/` has values for four kinds of clusters.

`python -m scripts.chart` generates this page from values.yaml. Edit values.yaml, not this page.
"""


@dataclass
class Value:
    """One key that a user can set."""

    key: str
    default: str
    meaning: str


@dataclass
class Chapter:
    """Keys that belong together."""

    title: str
    values: list[Value] = field(default_factory=list)


def read_values(text: str) -> list[Chapter]:
    """The values in the text of a values.yaml, grouped by its headings (`# ---- TITLE ---`).

    The comment above a key describes the key if it begins with `# --`.
    """
    lines = text.splitlines()
    headings = [(number, match[1]) for number, line in enumerate(lines) if (match := _HEADING.match(line))]
    chapters = {-1: Chapter("Names")} | {number: Chapter(title) for number, title in headings}
    for key, node, line in _leaves(yaml.compose(text)):
        begin = max(number for number in chapters if number < line)
        chapters[begin].values.append(Value(key, _shown(node), _comment_above(lines, line)))
    return [chapter for chapter in chapters.values() if chapter.values]


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any, int]]:
    """Each key that has a line of its own, with its value and the number of the line. A mapping in braces is one
    value."""
    for key, value in node.value:
        name = f"{path}{key.value}"
        is_block = isinstance(value, yaml.MappingNode) and not value.flow_style and name not in _WHOLE
        if is_block and value.value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value, key.start_mark.line


_WHOLE = {"podSecurityContext", "containerSecurityContext"}
"""Mappings that are only set as a whole."""


def _shown(node: Any) -> str:
    value = yaml.safe_load(yaml.serialize(node))
    return json.dumps(value) if len(json.dumps(value)) <= 60 else "see values.yaml"


def _comment_above(lines: list[str], line: int) -> str:
    block: list[str] = []
    while line and lines[line - 1].lstrip().startswith("# ") and not _HEADING.match(lines[line - 1]):
        line -= 1
        block.insert(0, lines[line].lstrip().removeprefix("# "))
    while block and not block[0].startswith("-- "):
        del block[0]
    return " ".join(block).removeprefix("-- ")


def readme(text: str) -> str:
    parts = [_HEAD]
    for chapter in read_values(text):
        parts.append(f"## {chapter.title}\n\n| key | default | |\n|---|---|---|")
        for value in chapter.values:
            meaning = value.meaning.replace("|", "\\|")
            parts.append(f"| `{value.key}` | `{value.default}` | {meaning} |")
        parts.append("")
    return "\n".join(parts)


def schema(text: str) -> str:
    """The schema in `text`, with Baton's sections as Baton defines them now. Definitions whose names begin with a
    lower-case letter belong to the chart itself, and stay."""
    whole = _with_required_keys(json.loads(text))
    generated = _without_words(BatonConfig.model_json_schema())
    own = {name: _with_required_keys(part) for name, part in whole["$defs"].items() if name[0].islower()}
    of_baton = generated.pop("$defs") | {"BatonConfig": generated}
    whole["$defs"] = own | dict(sorted(of_baton.items()))
    return json.dumps(whole, indent=2) + "\n"


def _with_required_keys(part: Any) -> Any:
    """The part, with all sections, numbers and booleans in it required. A key without a value, such as `replicas:`,
    removes the default. Then a template would fail at a section, and would read a number as 0 and a boolean as
    false."""
    if not _is_section(part):
        return part
    below = {key: _with_required_keys(inner) for key, inner in part["properties"].items()}
    required = [key for key, inner in below.items() if _is_required(inner) and key not in _MAY_BE_MISSING]
    return part | {"properties": below} | ({"required": required} if required else {})


def _is_section(part: Any) -> bool:
    return part.get("additionalProperties") is False and "properties" in part


def _is_required(part: Any) -> bool:
    is_plain = part.get("type") in ("integer", "boolean")
    return _is_section(part) or is_plain or part.get("$ref", "").endswith(_REQUIRED)


_REQUIRED = ("/service", "/monitor", "/port", "/BatonConfig")
"""The ends of references to definitions that are sections or numbers, and to Baton's configuration."""
_MAY_BE_MISSING = {"responseStore", "metricsKey", "testKey", "issuerRef", "egress"}
"""Sections without which templates work. Values of an earlier chart may lack them, and `helm upgrade --reuse-values`
gives such values to this chart."""


def _without_words(part: Any) -> Any:
    """The part without titles, descriptions and defaults: these are in Baton's own code."""
    if isinstance(part, list):
        return [_without_words(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {key: value for key, value in part.items() if key not in _WORDS}
    named = {
        key: {name: _without_words(inner) for name, inner in kept[key].items()} for key in _NAMED & set(kept)
    }
    return {key: named.get(key) or _without_words(value) for key, value in kept.items()}


_WORDS = {"title", "default", "description"}
_NAMED = {"properties", "$defs"}
"""Keywords whose value is a mapping with arbitrary names as keys. All other keys are keywords of JSON Schema."""


def ray_version(lock: str) -> str:
    """Ray's version in the lock file, in the form that KubeRay expects."""
    (version,) = re.findall(r"^ray==(.+)$", lock, re.MULTILINE)
    return f"{version}\n"


def generated_files() -> dict[Path, str]:
    """The content of every generated file."""
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    return {
        README: readme(VALUES.read_text()),
        SCHEMA: schema(SCHEMA.read_text()),
        RAY_VERSION: ray_version(lock),
        DASHBOARD: json.dumps(dashboard(), indent=2) + "\n",
    }


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("scripts.chart takes no arguments: it writes the files")
    for path, text in generated_files().items():
        path.write_text(text)
