"""TLS at both frontends, over real sockets, with certificates made by the commands of docs/security.md."""

import asyncio
import codecs
import contextlib
import errno
import json
import os
import shutil
import ssl
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import grpc
import httpx2
import openai
import pytest

from baton.clock import VirtualClock
from baton.config import Tls
from baton.errors import ConfigError
from baton.system.watched import Watched
from cli.main import REFUSED, main
from gateway import GatewayClient, GatewayError
from gateway.auth import certificates as certificates_module
from gateway.auth.certificates import Certificates, watched_certificates
from gateway.auth.credentials import Credentials
from gateway.grpc.server import _credentials
from tests.factories.api_keys import ADMIN, ALICE, API_KEYS
from tests.factories.certificates import CertificateFiles, make_certificate
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with

MAPPED = "[::ffff:127.0.0.1]"
"""The same place by an address that the certificate does not name."""
NOT_KNOWN_AS_LOOPBACK = "LOCALHOST"
"""This name means loopback. But a name may mean anything, so the rules for other hosts hold."""


async def ask_grpc(under_test: GatewayUnderTest, credentials: Credentials) -> str:
    """The model's name, or the name of gRPC's status code if the call fails."""
    target = f"localhost:{under_test.gateway.grpc_port}"
    async with GatewayClient(target, credentials=credentials) as client:
        try:
            return str((await client.model_info())["model"])
        except GatewayError as error:
            return error.code


async def ask_https(under_test: GatewayUnderTest, context: ssl.SSLContext, key: str = ALICE) -> int:
    """The status, or 0 if the connection fails."""
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(verify=context, headers=headers, timeout=60.0) as client:
        try:
            url = f"https://localhost:{under_test.gateway.http_port}/v1/models"
            return (await client.get(url)).status_code
        except httpx2.TransportError:
            return 0


async def test_both_frontends_speak_tls_and_nothing_else(
    folder: Path, files: CertificateFiles, others: CertificateFiles
) -> None:
    async with gateway_with(
        folder,
        {},
        {"w0": answering([7, 8])},
        host=NOT_KNOWN_AS_LOOPBACK,
        api_keys=API_KEYS,
        tls=Tls(**files.tls()),
        credentials=files.credentials(ADMIN),
    ) as under_test:
        assert await ask_grpc(under_test, files.credentials(ALICE)) == "tiny"
        assert await ask_grpc(under_test, files.credentials("baton-wrong")) == "UNAUTHENTICATED"
        assert await ask_grpc(under_test, others.credentials(ALICE)) == "UNAVAILABLE"
        assert await ask_grpc(under_test, Credentials(api_key=ALICE)) == "UNAVAILABLE"
        assert await ask_https(under_test, files.trusting()) == 200
        assert await ask_https(under_test, files.trusting(), "baton-wrong") == 401
        assert await ask_https(under_test, others.trusting()) == 0
        base_url = f"https://localhost:{under_test.gateway.http_port}/v1"
        http = httpx2.AsyncClient(verify=files.trusting(), timeout=60.0)
        async with openai.AsyncOpenAI(base_url=base_url, api_key=ALICE, http_client=http) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
        async with httpx2.AsyncClient(timeout=60.0) as plain:
            with pytest.raises(httpx2.TransportError):
                await plain.get(f"http://localhost:{under_test.gateway.http_port}/health")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_tls_begins_at_1_2(folder: Path, files: CertificateFiles) -> None:
    old, new = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2

    async with gateway_with(
        folder, {}, {}, tls=Tls(**files.tls()), credentials=files.credentials()
    ) as under_test:
        http_port, grpc_port = under_test.gateway.http_port, under_test.gateway.grpc_port
        for port, protocol in ((http_port, "http/1.1"), (grpc_port, "h2")):
            assert await negotiated(port, up_to(new, files, protocol)) == protocol
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await negotiated(port, up_to(old, files, protocol))


def up_to(version: ssl.TLSVersion, files: CertificateFiles, protocol: str) -> ssl.SSLContext:
    context = files.trusting()
    context.set_alpn_protocols([protocol])
    context.set_ciphers("ALL:@SECLEVEL=0")  # or OpenSSL itself refuses old versions
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = version
    return context


async def negotiated(port: int | None, context: ssl.SSLContext) -> str | None:
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    protocol: str | None = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()  # else a later test is warned of an open transport
    return protocol


async def test_only_clients_with_a_certificate_connect_where_it_is_asked_for(
    folder: Path, files: CertificateFiles, others: CertificateFiles
) -> None:
    async with gateway_with(
        folder,
        {},
        {},
        host=NOT_KNOWN_AS_LOOPBACK,
        tls=Tls(**files.tls(asks_clients=True)),
        credentials=files.credentials(has_own=True),
    ) as under_test:
        assert await ask_grpc(under_test, files.credentials(has_own=True)) == "tiny"
        assert await ask_grpc(under_test, files.credentials()) == "UNAVAILABLE"
        assert await ask_https(under_test, files.trusting(own=files)) == 200
        assert await ask_https(under_test, files.trusting()) == 0
        assert await ask_https(under_test, files.trusting(own=others)) == 0
        with pytest.raises(GatewayError, match=r"PERMISSION_DENIED.*scope 'administer'"):
            await under_test.client.drain("w0")  # a certificate alone allows no commands


async def test_a_file_of_authorities_may_have_comments_in_any_language(
    folder: Path, files: CertificateFiles, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text(f"NetLock Főtanúsítvány\n{files.ca.read_text()}", encoding="utf-8")
    tls = Tls(**{**files.tls(asks_clients=True), "client_ca_file": str(ca)})
    credentials = files.credentials(has_own=True)
    async with gateway_with(folder, {}, {}, tls=tls, credentials=credentials) as under_test:
        assert await ask_grpc(under_test, credentials) == "tiny"
        assert await ask_https(under_test, files.trusting(own=files)) == 200
        assert await ask_https(under_test, files.trusting()) == 0


async def test_files_may_begin_with_a_byte_order_mark(
    folder: Path, files: CertificateFiles, tmp_path: Path
) -> None:
    """Editors of Windows write one."""
    copies = CertificateFiles(tmp_path)
    for name in ("gateway.pem", "gateway.key", "ca.pem"):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (files.folder / name).read_bytes())
    tls, credentials = Tls(**copies.tls(asks_clients=True)), files.credentials(has_own=True)
    async with gateway_with(folder, {}, {}, tls=tls, credentials=credentials) as under_test:
        assert await ask_grpc(under_test, credentials) == "tiny"
        assert await ask_https(under_test, files.trusting(own=files)) == 200


async def test_the_authority_of_clients_may_be_an_intermediate_one(
    folder: Path, files: CertificateFiles, tmp_path: Path
) -> None:
    """The file need not contain the root of this authority. Without the root, clients of another authority
    below it have no access."""
    names = ("issuing", "sister")
    for name in names:
        authority = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        make_certificate(tmp_path, name, (files.ca, files.folder / "ca.key"), *authority)
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
        make_certificate(tmp_path, f"of-{name}", (tmp_path / f"{name}.pem", tmp_path / f"{name}.key"), *leaf)
    tls = Tls(**{**files.tls(asks_clients=True), "client_ca_file": str(tmp_path / "issuing.pem")})
    own, foreign = ((tmp_path / f"of-{name}.pem", tmp_path / f"of-{name}.key") for name in names)
    credentials = [
        Credentials(
            uses_tls=True, ca_pem=files.ca.read_bytes(), cert_pem=cert.read_bytes(), key_pem=key.read_bytes()
        )
        for cert, key in (own, foreign)
    ]
    contexts = [files.trusting(), files.trusting()]
    for context, pair in zip(contexts, (own, foreign), strict=True):
        context.load_cert_chain(*pair)
    async with gateway_with(folder, {}, {}, tls=tls, credentials=credentials[0]) as under_test:
        assert [await ask_grpc(under_test, each) for each in credentials] == ["tiny", "UNAVAILABLE"]
        assert [await ask_https(under_test, each) for each in contexts] == [200, 0]


@pytest.mark.parametrize("asks_clients", [False, True])
async def test_renewed_certificates_are_taken_up_without_a_restart(
    folder: Path, files: CertificateFiles, others: CertificateFiles, tmp_path: Path, asks_clients: bool
) -> None:
    """This also holds for the authority of clients' certificates. Open connections go on."""
    copies = CertificateFiles(tmp_path)

    def install(source: CertificateFiles) -> None:
        for file in source.folder.iterdir():
            shutil.copy(file, tmp_path / f"{file.name}.new")
            os.replace(tmp_path / f"{file.name}.new", tmp_path / file.name)

    def own(source: CertificateFiles) -> CertificateFiles | None:
        return source if asks_clients else None

    install(files)
    async with gateway_with(
        folder,
        {},
        {},
        tls=Tls(**copies.tls(asks_clients=asks_clients)),
        credentials=files.credentials(has_own=asks_clients),
    ) as under_test:
        assert (await under_test.client.model_info())["model"] == "tiny"
        assert await ask_https(under_test, files.trusting(own(files))) == 200
        install(others)
        await asyncio.sleep(1.1)  # files and TLS are real here, and the gateway reads the files once a second
        assert await ask_https(under_test, others.trusting(own(others))) == 200
        assert await ask_https(under_test, files.trusting(own(files))) == 0
        assert await ask_grpc(under_test, others.credentials(has_own=asks_clients)) == "tiny"
        assert await ask_grpc(under_test, files.credentials(has_own=asks_clients)) == "UNAVAILABLE"
        assert (await under_test.client.model_info())["model"] == "tiny"


async def test_commands_show_a_key_and_a_certificate(
    folder: Path, files: CertificateFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "ops.key"
    key_file.write_text(ADMIN)
    own = (
        "--tls-cert",
        str(files.folder / "alice.tls.pem"),
        "--tls-key",
        str(files.folder / "alice.tls.key"),
    )

    async with gateway_with(
        folder,
        {},
        {"w0": answering([7, 8])},
        api_keys=API_KEYS,
        tls=Tls(**files.tls(asks_clients=True)),
        credentials=files.credentials(ADMIN, has_own=True),
    ) as under_test:
        target = ("--target", f"localhost:{under_test.gateway.grpc_port}", "--tls-ca", str(files.ca))
        shown = (*target, *own, "--api-key-file", str(key_file))
        assert await asyncio.to_thread(main, ["status", *shown, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model_path"] == str(folder)
        ask = ["generate", *shown, "--raw", "--max-tokens", "2", "a b", "--json"]
        assert await asyncio.to_thread(main, ask) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == [7, 8]
        refused = [*target, *own, "--api-key", "baton-wrong"]
        assert await asyncio.to_thread(main, ["status", *refused]) == REFUSED
        error = capsys.readouterr().err
        assert "UNAUTHENTICATED: unknown or revoked API key" in error
        assert "pass an API key with --api-key-file" in error
        assert "baton-wrong" not in error


async def test_a_client_is_told_why_there_is_no_connection(
    folder: Path, files: CertificateFiles, others: CertificateFiles
) -> None:
    async def why_not(port: int, credentials: Credentials, host: str = "localhost") -> str:
        async with GatewayClient(f"{host}:{port}", credentials=credentials) as client:
            with pytest.raises(GatewayError) as caught:
                await client.model_info()
        return caught.value.message

    async with gateway_with(
        folder,
        {},
        {},
        tls=Tls(**files.tls(asks_clients=True)),
        credentials=files.credentials(has_own=True),
    ) as under_test:
        port, own = under_test.gateway.grpc_port, files.credentials(has_own=True)
        assert "is not signed by a trusted CA" in await why_not(port, others.credentials())
        assert "its certificate is for another host name" in await why_not(port, own, MAPPED)
        assert "it requires a client certificate" in await why_not(port, files.credentials())
        assert "and does it use TLS?" in await why_not(port, Credentials())
        mixed = replace(own, key_pem=others.credentials(has_own=True).key_pem)
        assert "gRPC cannot use the given CA, or the client's certificate" in await why_not(port, mixed)
    async with gateway_with(folder, {}, {}) as under_test:
        assert "it does not use TLS" in await why_not(under_test.gateway.grpc_port, files.credentials())
    assert (await why_not(1, Credentials())).endswith("is `baton serve` running?")
    assert (await why_not(1, files.credentials())).endswith("is `baton serve` running?")


async def test_a_kind_of_key_that_grpc_cannot_use_is_not_blamed_on_the_port_alone(
    folder: Path, files: CertificateFiles, tmp_path: Path
) -> None:
    make_certificate(tmp_path, "gateway", (files.ca, files.folder / "ca.key"), "-newkey", "rsa-pss")
    with pytest.raises(ConfigError, match=r"is it in use, or does gRPC not support the key of gateway\.tls"):
        async with gateway_with(folder, {}, {}, tls=Tls(**CertificateFiles(tmp_path).tls())):
            raise AssertionError("it started")


def test_files_that_cannot_be_used_are_named(
    files: CertificateFiles, others: CertificateFiles, tmp_path: Path
) -> None:
    good = files.tls(asks_clients=True)
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    secret = tmp_path / "secret.pem"
    secret.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for changed, complaint in (
        ({"cert_file": str(pipe)}, f"gateway.tls.cert_file {pipe}: cannot be read: it is not a regular file"),
        ({"cert_file": "/none"}, "gateway.tls.cert_file /none: cannot be read: No such file"),
        ({"key_file": str(tmp_path)}, f"gateway.tls.key_file {tmp_path}: cannot be read: Is a directory"),
        ({"client_ca_file": "/none"}, "gateway.tls.client_ca_file /none: cannot be read"),
        ({"cert_file": good["key_file"]}, "gateway.tls.cert_file .* contains no certificate"),
        ({"key_file": good["cert_file"]}, "gateway.tls.key_file .* contains no private key"),
        ({"key_file": others.tls()["key_file"]}, "does not match the certificate in cert_file"),
        ({"key_file": str(secret)}, "is encrypted, and its passphrase cannot be entered"),
        ({"cert_file": str(broken)}, "gateway.tls: cannot use cert_file .*broken.pem and key_file"),
        ({"client_ca_file": str(broken)}, "gateway.tls.client_ca_file .*broken.pem: "),
    ):
        with pytest.raises(ConfigError, match=complaint):
            watched_certificates(Tls(**{**good, **changed}), VirtualClock())


def watched_copies(files: CertificateFiles, folder: Path) -> tuple[Watched[Certificates], VirtualClock]:
    """Copies of the files in `folder`, which the test may renew."""
    for file in files.folder.iterdir():
        shutil.copy(file, folder)
    clock = VirtualClock()
    return watched_certificates(Tls(**CertificateFiles(folder).tls()), clock), clock


def test_half_a_renewal_changes_nothing(
    files: CertificateFiles, others: CertificateFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates, clock = watched_copies(files, tmp_path)
    before = certificates.current()
    shutil.copy(others.folder / "gateway.pem", tmp_path)
    clock.advance(1.0)
    assert certificates.current() is before
    assert "does not match the certificate" in caplog.text
    shutil.copy(others.folder / "gateway.key", tmp_path)
    assert certificates.current() is before  # the files are read once a second
    clock.advance(1.0)
    assert certificates.current().cert_pem == (others.folder / "gateway.pem").read_bytes()


def test_grpc_gets_certificates_anew_only_after_a_renewal(
    files: CertificateFiles, others: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC asks at each connection. If it always got certificates, simultaneous connections could kill the process."""
    credentials = Mock()
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", credentials)
    certificates, clock = watched_copies(files, tmp_path)
    _credentials(certificates)
    _, ask = credentials.call_args.args
    assert [ask(), ask()] == [None, None]
    for name in ("gateway.pem", "gateway.key"):
        shutil.copy(others.folder / name, tmp_path)
    clock.advance(1.0)
    assert isinstance(ask(), grpc.ServerCertificateConfiguration)
    assert ask() is None


@pytest.mark.parametrize(
    "reads", [(certificates_module, "open_regular"), (ssl.SSLContext, "load_cert_chain")]
)
def test_a_renewal_that_could_not_be_read_is_read_later(
    reads: tuple[object, str],
    files: CertificateFiles,
    others: CertificateFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process may have had too many open files."""
    certificates, clock = watched_copies(files, tmp_path)
    before = certificates.current()
    for name in ("gateway.pem", "gateway.key"):
        shutil.copy(others.folder / name, tmp_path)
    with monkeypatch.context() as patches:
        patches.setattr(*reads, Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        for _ in range(3):
            clock.advance(1.0)
            assert certificates.current() is before
    assert caplog.text.count("Too many open files") == 1
    clock.advance(1.0)
    assert certificates.current().cert_pem == (others.folder / "gateway.pem").read_bytes()
    renewed = certificates.current()
    clock.advance(1.0)
    assert certificates.current() is renewed
