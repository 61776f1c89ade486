"""Descriptions of invented fleets, as `GatewayClient.describe` returns them."""

from typing import Any


def worker(name: str, role: str = "decode", state: str = "ready", **fields: Any) -> dict[str, Any]:
    """A healthy worker. `fields` are fields of the message; nested messages may be incomplete."""
    found: dict[str, Any] = {
        "name": name,
        "role": role,
        "state": state,
        "incarnation": f"{name}-incarnation",
        "node": "n1",
        "pid": 4000,
        "threads": 2,
        "cpus": [0, 1],
        "quantization": "",
        "kv_blocks": {
            "total": 100,
            "free": 100,
            "quarantined": 0,
            "leased": 0,
            "host_total": 0,
            "host_used": 0,
        },
        "requests": {"running": 0, "waiting": 0, "waiting_for_remote_kvs": 0},
        "counters": {},
        "kv_peers": [],
        "load": {
            "queued_prompt_tokens": 0,
            "oldest_waiting_s": 0.0,
            "prefill_tokens_per_s": 0.0,
            "decode_step_s": 0.0,
        },
        "failure": "",
        "slot": {
            "state": "serving",
            "role": role,
            "node": "n1",
            "starts": 1,
            "last_failure": "",
            "next_start_in_s": None,
        },
    }
    for key, value in fields.items():
        found[key] = {**found[key], **value} if isinstance(value, dict) and found[key] else value
    return found


def missing(name: str, state: str, **slot: Any) -> dict[str, Any]:
    """A worker without a process."""
    nothing = {"total": 0, "free": 0}
    return worker(
        name,
        state=state,
        incarnation="",
        node="",
        pid=0,
        threads=0,
        cpus=[],
        kv_blocks=nothing,
        slot={"state": state, **slot},
    )


def loaded_from(peer: str, num_mib: float, done: int, **fields: Any) -> dict[str, Any]:
    """A consumer's counts of the KV that it loaded from a producer."""
    counts = {
        "role": "consumer",
        "peer": peer,
        "transport": "shared_memory",
        "done": done,
        "failed": 0,
        "bytes": int(num_mib * 2**20),
        "queued_s": 0.1 * done,
        "moving_s": 0.01 * done,
        "exposed_s": 0.0,
        "not_needed": 0,
    }
    return {**counts, **fields}


def node(name: str, **fields: Any) -> dict[str, Any]:
    found = {"name": name, "address": "10.0.0.2", "is_alive": True, "is_head": False, "workers": []}
    return {**found, "is_draining": False, "resources": {"CPU": 8.0}, **fields}


def gateway(**fields: Any) -> dict[str, Any]:
    counters = {"failed": 1, "migrated_given_back": 2, "migrated_lost": 3, "migrated_refused": 0}
    found = {"in_flight": 0, "queued": 0, "paths": {"disaggregated": 12, "fallback": 0, "local": 2}}
    return {**found, "counters": counters, **fields}


def description(*workers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": "smollm2",
        "model_path": "/models/smollm2",
        "dtype": "float32",
        "kv_cache_dtype": "bfloat16",
        "workers": list(workers),
        "gateway": gateway(in_flight=3, queued=1),
        "nodes": [node("n1", workers=[each["name"] for each in workers])],
        "controller": {
            "state": "answering",
            "incarnation": "c0ffee00c0ffee00",
            "failure": "",
            "decisions": [],
        },
    }
    return {**found, **fields}
