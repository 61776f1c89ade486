"""Every error that a client can cause has a status in both protocols; all others are internal in both."""

from http import HTTPStatus

import pytest

from baton import errors
from gateway.error_codes import codes_of, name_of
from gateway.grpc.status import reason_of

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BatonError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_both_protocols_agree_which_errors_are_internal(kind: type[errors.BatonError]) -> None:
    codes = codes_of(kind.__new__(kind))
    assert codes.is_internal == (codes.http is HTTPStatus.INTERNAL_SERVER_ERROR)
    is_clients = issubclass(kind, errors.RequestError) and kind is not errors.RequestError
    assert not (is_clients and codes.is_internal)


def test_unexpected_errors_are_internal() -> None:
    assert codes_of(ZeroDivisionError()).is_internal


def test_clients_and_metrics_see_the_names_of_the_table_only() -> None:
    """They do not see the names of subclasses, which parts of Baton use among themselves."""

    class CallNotSent(errors.ClusterError):
        pass

    for error in (errors.FleetEnded("over"), CallNotSent("no connection"), errors.ClusterError("busy")):
        assert name_of(error) == "ClusterError"
        assert reason_of(error, codes_of(error).grpc) == "CLUSTER_ERROR"
    assert name_of(errors.UnknownWorker("x")) == "UnknownWorker", "a row of its own"
