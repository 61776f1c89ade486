"""The dashboard's file is what its source says, and each alert has a case that raises it."""

import json

import yaml

from scripts import chart, dashboard
from tests.factories.promql import DASHBOARD, FOLDER, alert_expressions, metrics_in


def test_the_file_is_up_to_date() -> None:
    assert DASHBOARD.read_text() == chart.generated_files()[DASHBOARD], "run python -m scripts.chart"


def test_panels_have_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < dashboard.WIDTH


def test_every_alert_is_about_something() -> None:
    names = [name for name, _ in alert_expressions()]
    assert len(set(names)) == len(names)
    assert [name for name, expression in alert_expressions() if not metrics_in(expression)] == [
        "BatonGatewayDown"
    ]


def test_each_alert_is_raised_by_a_case_for_promtool() -> None:
    cases = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == {
        name for name, _ in alert_expressions()
    }
