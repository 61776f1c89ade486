"""Which gateway a command asks, and what it shows there."""

import argparse
import os
from pathlib import Path

import pytest

from baton.errors import ConfigError
from cli.command_flags import add_target_flags
from cli.target import KEY_VARIABLE, Target, advice_on_proxy, target_from


def target(*arguments: str, environment: dict[str, str] | None = None) -> Target:
    parser = argparse.ArgumentParser()
    add_target_flags(parser, "localhost:1")
    return target_from(parser.parse_args(arguments), environment or {})


def test_flags_win_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    environment = {KEY_VARIABLE: "from-environment"}
    assert target().credentials.api_key is None
    assert target(environment=environment).credentials.api_key == "from-environment"
    flag = ("--api-key-file", str(file))
    assert target(*flag, environment=environment).credentials.api_key == "from-file"
    assert target("--api-key", "k", environment=environment).credentials.api_key == "k"
    assert target("--target", "h:5").address == "h:5"


def test_a_key_is_never_printed_with_what_holds_it() -> None:
    assert "secret" not in repr(target("--api-key", "secret"))


@pytest.mark.parametrize("content", ["", "\n", "two words", "two\nlines", "kľúč", "\x00"])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(
        ConfigError, match=r"--api-key-file .*file: no valid API key; expected one word"
    ) as caught:
        target("--api-key-file", str(file))
    assert "two" not in str(caught.value)
    with pytest.raises(ConfigError, match="BATON_API_KEY: no valid API key"):
        target(environment={KEY_VARIABLE: content})


@pytest.mark.parametrize("address", ["", " "])
def test_a_target_must_not_be_empty(address: str) -> None:
    """The target may come from a variable that is not set. gRPC would print its own lines and an internal error."""
    with pytest.raises(ConfigError, match=r"--target: got ' ?'; use HOST:PORT"):
        target("--target", address)


def test_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """gRPC would not find a certificate behind this mark."""
    key, ca = tmp_path / "key", tmp_path / "ca.pem"
    key.write_text("secret\n", encoding="utf-8-sig")
    ca.write_text("-----BEGIN CERTIFICATE-----", encoding="utf-8-sig")
    credentials = target("--api-key-file", str(key), "--tls-ca", str(ca)).credentials
    assert (credentials.api_key, credentials.ca_pem) == ("secret", b"-----BEGIN CERTIFICATE-----")


def test_certificates_imply_tls(tmp_path: Path) -> None:
    cert, key, other = tmp_path / "cert", tmp_path / "key", tmp_path / "other"
    cert.write_text("-----BEGIN CERTIFICATE-----")
    key.write_text("-----BEGIN PRIVATE KEY-----")
    other.write_text("{}")
    assert not target().credentials.uses_tls
    assert target("--tls").credentials.uses_tls
    with_ca = target("--tls-ca", str(cert)).credentials
    assert (with_ca.uses_tls, with_ca.ca_pem) == (True, cert.read_bytes())
    own = target("--tls-cert", str(cert), "--tls-key", str(key)).credentials
    assert (own.uses_tls, own.cert_pem, own.key_pem) == (True, cert.read_bytes(), key.read_bytes())
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key must be given together"):
        target("--tls-cert", str(cert))
    with pytest.raises(ConfigError, match="--tls-ca /none: cannot be read: No such file"):
        target("--tls-ca", "/none")
    with pytest.raises(ConfigError, match=f"--tls-ca {other}: contains no certificate in PEM"):
        target("--tls-ca", str(other))
    with pytest.raises(ConfigError, match=f"--tls-key {cert}: contains no private key in PEM"):
        target("--tls-cert", str(cert), "--tls-key", str(cert))


def test_a_proxy_is_named_only_where_grpc_uses_it() -> None:
    proxies = {"http_proxy": "http://p:3128", "https_proxy": "http://q:3128", "HTTP_PROXY": "http://p:3128"}
    (advice,) = advice_on_proxy("10.0.0.1:50051", proxies)
    assert advice.startswith("https_proxy is set; add the gateway's host to no_proxy")
    assert advice_on_proxy("10.0.0.1:50051", {"http_proxy": "", "HTTP_PROXY": "http://p:3128"}) == []
    for own in ("127.0.0.1:50051", "localhost:50051", "[::1]:50051"):
        assert advice_on_proxy(own, proxies) == []


def test_a_pipe_that_nobody_writes_to_is_empty(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"--api-key-file .*pipe: no valid API key"):
        target("--api-key-file", str(pipe))
