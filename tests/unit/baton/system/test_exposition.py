"""Exposition: a reader gets the format that it accepts, and one with a broken header the text format."""

import pytest
from prometheus_client import CollectorRegistry

from baton.system.exposition import render


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("text/plain; version=1.0.0", "text/plain; version=1.0.0"),
        ("", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=zz", "text/plain; version=0.0.4"),
        ("text/plain;version=1.x", "text/plain; version=0.0.4"),
    ],
)
def test_each_accept_header_gets_an_answer(accept: str, content_type: str) -> None:
    assert render(CollectorRegistry(), accept)[1].startswith(content_type)
