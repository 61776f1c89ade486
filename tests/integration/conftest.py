"""What the integration tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories.certificates import CertificateFiles, make_certificates
from tests.factories.foreign_ray import foreign_ray


@pytest.fixture(scope="session")
def address_of_ray() -> Iterator[str]:
    """A Ray cluster with room for two workers, to join. Every test gives its room back."""
    # Ray's sockets do not fit below pytest's own temporary folders.
    with (
        tempfile.TemporaryDirectory(prefix="b", dir="/tmp", ignore_cleanup_errors=True) as folder,
        foreign_ray(2, Path(folder)) as address,
    ):
        yield address


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    """Certificates of one authority."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    """Certificates of another authority, with the same names."""
    return make_certificates(tmp_path_factory.mktemp("others"))
