"""A scene of two keys: one fills the tokenizer with long texts, the other one chats."""

import http.client
import json
import statistics
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from tests.factories.api_keys import ALICE, API_KEYS, BOB, WATCHER
from tests.factories.models import make_model_dir
from tests.factories.serving import serving
from tests.hostile.finding import Finding
from tests.hostile.http import CALL_TIMEOUT_S, SPAWN

NUM_TEXTS = 300
NUM_CHARACTERS = 120_000
NUM_CHATS = 20
NUM_POSITIONS = 16_384
"""So that such a text is tokenized before it is refused."""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def texts(model: Path, folder: Path) -> Finding:
    """Long texts of one key at once, again and again, beside short chats of another key."""
    finding = Finding(
        f"{NUM_TEXTS} texts of {NUM_CHARACTERS:,} characters at once by one key, chats of another"
    )
    entries = [key.model_dump(mode="json", exclude_none=True) for key in API_KEYS]
    longer = make_model_dir(folder / "model", max_position_embeddings=NUM_POSITIONS)
    keys = folder / "keys.json"
    keys.write_text(json.dumps(entries))
    keys.chmod(0o600)
    config = folder / "texts.yaml"
    config.write_text(
        f"model: {{path: {longer}, dtype: float32}}\n"
        "engine: {kv_cache_memory_mib: 64, num_threads: 1}\n"
        "cluster: {ray_address: none, prefill: 0, decode: 1}\n"
        f"gateway: {{grpc_port: 0, http_port: 0, api_keys_file: {keys}}}\n"
    )
    with serving(str(config)) as serve:
        address = serve.wait_ready()["http"]
        name = json.loads(_ask(address, "/v1/models", BOB)[1])["data"][0]["id"]
        chat = {"model": name, **CHAT}
        alone = _chats(address, BOB, chat)
        ours, theirs = SPAWN.Pipe()
        holder = SPAWN.Process(target=_hold, args=(address, ALICE, theirs))
        holder.start()
        assert ours.recv() == "begun"
        beside = _chats(address, BOB, chat)
        metrics = _ask(address, "/metrics", WATCHER)[1].decode()
        ours.send("over")
        got = ours.recv()
        holder.join()
        serve.interrupt()
        finding.expect(serve.wait_gone() == 0, "baton serve did not end well")
    for when, chats in (("alone", alone), ("beside", beside)):
        times = [took_s for _, took_s in chats]
        finding.seen[f"chats {when}"] = f"median {statistics.median(times):.2f} s, slowest {max(times):.2f} s"
        statuses = Counter(status for status, _ in chats)
        finding.expect(set(statuses) == {200}, f"chats {when} it: {dict(statuses)}")
    finding.seen["the texts' answers"] = ", ".join(f"{number} x {status}" for status, number in got.items())
    finding.expect(set(got) <= {200, 429}, "texts are answered, or too many")
    stall = next(
        line for line in metrics.splitlines() if line.startswith("baton_event_loop_longest_stall_seconds ")
    )
    finding.seen["the loop's longest stall"] = f"{float(stall.split()[1]):.3f} s"
    return finding


def _chats(address: str, key: str, chat: dict[str, Any]) -> list[tuple[int, float]]:
    """Status and duration of one chat after another."""
    chats = []
    for _ in range(NUM_CHATS):
        began = time.monotonic()
        status, _answer = _ask(address, "/v1/chat/completions", key, chat)
        chats.append((status, time.monotonic() - began))
    return chats


def _hold(address: str, key: str, pipe: "Connection[Any, Any]") -> None:
    """Runs in a process of its own: NUM_TEXTS threads send the text until a message comes through the pipe."""
    got: Counter[int] = Counter()
    body = {"prompt": "Qz" * (NUM_CHARACTERS // 2)}
    is_over = False

    def send() -> None:
        while not is_over:
            status, _ = _ask(address, "/tokenize", key, body)
            got[status] += 1
            if status != 200:
                time.sleep(1.0)  # as the refusal's hint says

    threads = [Thread(target=send) for _ in range(NUM_TEXTS)]
    for thread in threads:
        thread.start()
    while not got:
        time.sleep(0.1)
    pipe.send("begun")
    pipe.recv()
    is_over = True
    for thread in threads:
        thread.join()
    pipe.send(dict(got))


def _ask(address: str, path: str, key: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=CALL_TIMEOUT_S)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request(
            "GET" if body is None else "POST", path, json.dumps(body) if body else None, headers
        )
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
