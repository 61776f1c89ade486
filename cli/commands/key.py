"""`baton key`: makes an API key and its configuration entry; stores neither."""

import json
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from baton.config import ApiKey, describe
from baton.errors import ConfigError
from gateway.auth.key_store import hash_of, new_key


def run(name: str, scopes: Sequence[str], as_json: bool) -> int:
    """Prints the entry to stdout, and the key to stderr. `as_json`: prints both as one JSON object to stdout instead.

    The key is shown only now, since it is not stored.
    """
    key = new_key()
    entry = {"name": name, "sha256": hash_of(key), "scopes": list(scopes)}
    try:
        ApiKey.model_validate(entry)
    except ValidationError as error:
        raise ConfigError(describe(error, "API key")) from None
    if as_json:
        print(json.dumps({"key": key, "entry": entry}))
        return 0
    print(f"API key of {name} (shown only once): {key}", file=sys.stderr)
    print(f"- name: {json.dumps(name)}\n  sha256: {entry['sha256']}\n  scopes: [{', '.join(scopes)}]")
    return 0
