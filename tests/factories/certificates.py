"""Certificates made with the commands of docs/security.md, which run in a folder."""

import re
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gateway.auth.credentials import Credentials

SECURITY = Path(__file__).resolve().parents[2] / "docs" / "security.md"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A CA, a gateway's certificate for localhost and 127.0.0.1, and a client's certificate."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def tls(self, *, asks_clients: bool = False) -> dict[str, str]:
        """The configuration's section `gateway.tls`."""
        files = {"cert_file": str(self.folder / "gateway.pem"), "key_file": str(self.folder / "gateway.key")}
        return {**files, "client_ca_file": str(self.ca)} if asks_clients else files

    def credentials(self, api_key: str | None = None, *, has_own: bool = False) -> Credentials:
        """The credentials of a client that trusts the CA.

        With `has_own`, the client also has a certificate.
        """
        cert, key = self.folder / "alice.tls.pem", self.folder / "alice.tls.key"
        return Credentials(
            api_key=api_key,
            uses_tls=True,
            ca_pem=self.ca.read_bytes(),
            cert_pem=cert.read_bytes() if has_own else None,
            key_pem=key.read_bytes() if has_own else None,
        )

    def trusting(self, own: "CertificateFiles | None" = None) -> ssl.SSLContext:
        """A context for HTTPS clients. They trust this CA, and present the client's certificate of `own`."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if own is not None:
            context.load_cert_chain(own.folder / "alice.tls.pem", own.folder / "alice.tls.key")
        return context


def make_certificates(folder: Path) -> CertificateFiles:
    blocks = re.findall(r"```sh\n(openssl .*?)```", SECURITY.read_text(), re.DOTALL)
    assert len(blocks) == 2
    script = "set -e\n" + "\n".join(blocks)
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, capture_output=True, timeout=120)
    return CertificateFiles(folder)


def make_certificate(folder: Path, name: str, issuer: tuple[Path, Path], *options: str) -> None:
    """Makes NAME.pem and NAME.key. `issuer`: the certificate and the key of the CA that signs it."""
    kind = () if "-newkey" in options else ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    files = ("-CA", issuer[0], "-CAkey", issuer[1], "-keyout", f"{name}.key", "-out", f"{name}.pem")
    common = ("-noenc", "-days", "365", "-subj", f"/CN={name}")
    command = ("openssl", "req", "-x509", *kind, *common, *options, *files)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
