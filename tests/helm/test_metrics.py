"""The objects of the Prometheus operator and of Grafana, with several releases in one Prometheus."""

import json
import re
from typing import Any

import pytest

from tests.factories.chart import Object, Release, merged, needs_helm, render
from tests.factories.promql import alert_expressions, dashboard_expressions, selectors_in

pytestmark = needs_helm

METRICS: dict[str, Any] = {
    "metrics": {
        part: {"enabled": True} for part in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    }
}
ENDPOINTS = {"ServiceMonitor": "endpoints", "PodMonitor": "podMetricsEndpoints"}


def rules(release: Release) -> list[Object]:
    return [rule for group in release.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_every_metric_has_the_label_of_its_release(kind: str) -> None:
    (endpoint,) = render(METRICS, name="blue").one(kind)["spec"][ENDPOINTS[kind]]
    assert {"targetLabel": "baton_release", "replacement": "llm/blue"} in endpoint["relabelings"]


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_metrics_get_further_labels(kind: str) -> None:
    part, added = kind[0].lower() + kind[1:], [{"targetLabel": "model_name", "replacement": "smollm2"}]
    more = {"metrics": {part: {"enabled": True, "relabelings": added}}}
    (plain,) = render(METRICS).one(kind)["spec"][ENDPOINTS[kind]]
    (endpoint,) = render(merged(METRICS, more)).one(kind)["spec"][ENDPOINTS[kind]]
    assert endpoint["relabelings"] == plain["relabelings"] + added


def test_alerts_are_about_the_metrics_of_their_own_release() -> None:
    found = rules(render(METRICS, name="blue"))
    assert len(found) == len(list(alert_expressions()))
    for rule in found:
        selectors = selectors_in(rule["expr"])
        assert selectors, rule["alert"]
        assert [each for each in selectors if 'baton_release="llm/blue"' not in each] == [], rule["alert"]
        assert rule["labels"]["baton_release"] == "llm/blue", (
            "or Alertmanager takes two releases' alerts for one"
        )
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_alerts_are_those_of_the_plain_file_otherwise() -> None:
    for rule, (name, expression) in zip(rules(render(METRICS)), alert_expressions(), strict=True):
        plain = re.sub(r'\{baton_release="llm/demo"(?:, (?=[^}]))?', "{", rule["expr"]).replace("{}", "")
        assert (rule["alert"], plain) == (name, expression)


def test_the_dashboard_shows_one_release_of_several() -> None:
    dashboard = json.loads(render(METRICS).one("ConfigMap", "-dashboard")["data"]["baton.json"])
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["release"]["query"]["query"] == "label_values(baton_build_info, baton_release)"
    for title, expression in dashboard_expressions():
        selectors = selectors_in(expression)
        assert selectors, title
        assert [each for each in selectors if 'baton_release="$release"' not in each] == [], title


@pytest.mark.parametrize("labels", [None, {}, {"grafana_dashboard": None, "mine": "1"}])
def test_the_dashboard_renders_with_any_labels(labels: Object | None) -> None:
    values = merged(METRICS, {"metrics": {"dashboard": {"labels": labels}}})
    if labels == {}:  # helm merges mappings: this one leaves the default in
        values = merged(values, {"metrics": {"dashboard": {"labels": {"grafana_dashboard": None}}}})
    found = render(values).one("ConfigMap", "-dashboard")["metadata"]["labels"]
    assert found["app.kubernetes.io/component"] == "metrics"
    assert found.get("mine") == (labels or {}).get("mine")
