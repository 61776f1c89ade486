"""The PromQL of the dashboard and of the alerts, and the metrics in it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
DASHBOARD = ROOT / "helm" / "baton" / "files" / "dashboard.json"
ALERTS = DASHBOARD.with_name("alerts.yaml")
DOCUMENT = ROOT / "docs" / "observability.md"


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """The title of a panel, and one of its queries."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def alert_expressions() -> Iterator[tuple[str, str]]:
    """The name of an alert, and its condition."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def documented_metrics() -> set[str]:
    """The metric names in the first column of the section's tables, without prefix."""
    _, _, text = DOCUMENT.read_text().partition("### All metrics")
    text, _, _ = text.partition("\n## ")
    rows = re.findall(r"^\| (`[a-z0-9_]+`(?:, `[a-z0-9_]+`)*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row)}


def metrics_in(expression: str) -> set[str]:
    """The names of our metrics in an expression, and of metrics that Prometheus' library adds."""
    return set(re.findall(r"\b(?:baton|process)_[a-z0-9_]+", re.sub(r"\{[^}]*\}", "", expression)))


def selectors_in(expression: str) -> list[str]:
    """Each use of a metric in an expression, with its labels in braces if it has any."""
    return re.findall(r"\b(?:up|(?:baton|process)_[a-z0-9_]+)\b(?:\{[^}]*\})?", expression)
