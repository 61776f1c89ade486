"""API keys with and without scopes, and their entries in a key file."""

from baton.config import ApiKey
from gateway.auth.credentials import Credentials
from gateway.auth.key_store import hash_of

ALICE = "baton-alice"
BOB = "baton-bob"
WATCHER = "baton-watcher"
ADMIN = "baton-admin"


def entry(name: str, key: str, **grants: object) -> ApiKey:
    return ApiKey(name=name, sha256=hash_of(key), **grants)  # type: ignore[arg-type]


API_KEYS = (
    entry("alice", ALICE),
    entry("bob", BOB),
    entry("watcher", WATCHER, scopes=["observe"]),
    entry("admin", ADMIN, scopes=["administer", "generate"]),
)
"""The API keys of two clients, Prometheus, and an operator."""

AS_ADMIN = Credentials(api_key=ADMIN)
