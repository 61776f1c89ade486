"""The dashboard's file is what its source says."""

import json

from scripts import chart, dashboard
from tests.factories.promql import DASHBOARD, alert_expressions, metrics_in


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
