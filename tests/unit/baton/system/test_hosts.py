"""Names and addresses of hosts: what has their form."""

import pytest

from baton.system.hosts import is_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node:80", True),
        ("10.0.0.7:65535", True),
        ("[::1]:80", True),
        ("::1:80", False),
        ("[::1]", False),
        ("[node]:80", False),
        ("[no:de]:80", False),
        ("node", False),
        ("node:", False),
        (":80", False),
        ("node:0", False),
        ("node:65536", False),
        ("node:-1", False),
        ("node:http", False),
        ("node:\N{ARABIC-INDIC DIGIT EIGHT}", False),
        ("a..b:80", False),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, expected: bool) -> None:
    assert is_address(text) is expected
