"""What a request continues: whole chains, references to items, and never more than a conversation may have."""

import json
from typing import Any

import pytest

from baton.clock import VirtualClock
from baton.errors import InvalidRequest, UnknownPreviousResponse, UnknownResponse
from gateway.conversation import ArgumentsDelta, CallBegins, CallEnds, Text
from gateway.http.responses import history as history_module
from gateway.http.responses.conversation import messages_of
from gateway.http.responses.create_request import ResponseRequest
from gateway.http.responses.history import (
    History,
    HistoryReader,
    context_pieces,
    input_items_of,
    input_json,
)
from gateway.http.responses.items import MessageItem
from gateway.http.responses.output import ResponseOutput
from gateway.http.responses.store import MemoryStore, StoreBounds, StoredResponse

MIB = 2**20


def reader(store: MemoryStore, max_bytes: int = MIB, caller: str = "alice") -> HistoryReader:
    return HistoryReader(store, caller, max_bytes)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(StoreBounds(8 * MIB, 1000.0), 8 * MIB, VirtualClock())


def items_of(*items: dict[str, Any]) -> Any:
    return ResponseRequest.model_validate({"model": "tiny", "input": list(items)}).items


async def kept(store: MemoryStore, name: str, before: str | None, *items: dict[str, Any]) -> None:
    """A response with these items as input, whose output is its own name and a call."""
    read = reader(store)
    history = await read.history_up_to(before)
    own = input_json(await read.resolve(items_of(*items), history), name)
    output = ResponseOutput(name, None)
    list(
        output.on_events([Text(f"text of {name}"), CallBegins(0, "f"), ArgumentsDelta(0, "{}"), CallEnds(0)])
    )
    list(output.end(is_cut=False))
    context = "".join(context_pieces(history, own, output.items)).encode()
    await store.keep("alice", f"resp_{name}", StoredResponse(b"{}", context))


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text} | fields


async def test_a_chain_has_all_turns_in_order(store: MemoryStore) -> None:
    await kept(store, "a", None, user("one"))
    await kept(store, "b", "resp_a", user("two"))
    await kept(store, "c", "resp_b", user("three"))
    history = await reader(store).history_up_to("resp_c")
    assert history.ancestors == ("resp_a", "resp_b", "resp_c")
    texts = [item.text for item in history.items if item.type == "message"]
    assert texts == ["one", "text of a", "two", "text of b", "three", "text of c"]
    assert (await reader(store).history_up_to(None)) == History()


async def test_each_response_keeps_its_own_turn_alone(store: MemoryStore) -> None:
    """So a long chain costs what its conversation costs."""
    before = None
    for number in range(100):
        await kept(store, f"{number:03}", before, user("x" * 1000))
        before = f"resp_{number:03}"
    assert store.num_bytes < 100 * 5000


@pytest.mark.parametrize("gone", ["resp_a", "resp_b", "resp_c"])
async def test_a_chain_with_a_gap_is_not_continued(store: MemoryStore, gone: str) -> None:
    await kept(store, "a", None, user("one"))
    await kept(store, "b", "resp_a", user("two"))
    await kept(store, "c", "resp_b", user("three"))
    await store.delete("alice", gone)
    with pytest.raises(UnknownPreviousResponse, match=r"'resp_c' cannot be continued") as caught:
        await reader(store).history_up_to("resp_c")
    assert caught.value.field == "previous_response_id"


async def test_another_callers_chain_is_not_there(store: MemoryStore) -> None:
    await kept(store, "a", None, user("one"))
    with pytest.raises(UnknownPreviousResponse) as hers:
        await reader(store, caller="bob").history_up_to("resp_a")
    with pytest.raises(UnknownPreviousResponse) as nobodys:
        await reader(store, caller="bob").history_up_to("resp_z")
    assert str(hers.value).replace("resp_a", "resp_z") == str(nobodys.value)
    with pytest.raises(UnknownResponse):
        await reader(store, caller="bob").resolve(items_of({"id": "msg_a_0"}), History())


async def test_references_stand_for_stored_items(store: MemoryStore) -> None:
    await kept(store, "a", None, user("one", id="msg_mine"), user("more"))
    await kept(store, "b", None, user("two"))
    history = await reader(store).history_up_to("resp_a")
    found = await reader(store).resolve(
        items_of(
            {"id": "msg_a_0"}, {"type": "item_reference", "id": "msg_b_i0"}, {"id": "msg_mine"}, user("x")
        ),
        history,
    )
    assert [item.text for item in found if isinstance(item, MessageItem)] == ["text of a", "two", "one", "x"]
    (call,) = await reader(store).resolve(items_of({"id": "fc_b_1"}), History())
    assert (call.type, call.status) == ("function_call", "completed")
    with pytest.raises(UnknownResponse, match="no stored item has the id 'msg_a_9'") as caught:
        await reader(store).resolve(items_of(user("x"), {"id": "msg_a_9"}), history)
    assert caught.value.field == "input.1.id"


async def test_without_a_store_a_reference_is_what_is_wrong() -> None:
    with pytest.raises(UnknownResponse, match=r"input\.1\.id: this gateway keeps no responses"):
        await HistoryReader(None, "alice", MIB).resolve(
            items_of(user("one"), {"type": "item_reference", "id": "msg_a_0"}), History()
        )


async def test_a_conversation_is_bounded(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept(store, "a", None, user("x" * 1000))
    await kept(store, "b", "resp_a", user("two"))
    with pytest.raises(InvalidRequest, match="more bytes"):
        await reader(store, max_bytes=1000).history_up_to("resp_b")
    monkeypatch.setattr(history_module, "MAX_ITEMS", 5)
    with pytest.raises(InvalidRequest, match="has 6 items"):
        await reader(store).history_up_to("resp_b")
    monkeypatch.setattr(history_module, "MAX_ANCESTORS", 1)
    with pytest.raises(InvalidRequest, match="has 1 responses"):
        await reader(store).history_up_to("resp_b")
    with pytest.raises(InvalidRequest, match="at most 64"):
        await reader(store).resolve(items_of(*({"id": f"msg_{n}_0"} for n in range(65))), History())


@pytest.mark.parametrize("is_continued", [True, False])
async def test_references_are_bounded_however_often_they_name_an_item(
    store: MemoryStore, is_continued: bool
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{" + " " * 700 + "}"}
    await kept(store, "a", None, user("x" * 1000), call)
    history = await reader(store).history_up_to("resp_a" if is_continued else None)

    async def refer_to(item_id: str, number: int) -> int:
        return len(await reader(store, 4000).resolve(items_of(*[{"id": item_id}] * number), history))

    assert await refer_to("msg_a_i0", 4) == 4
    assert await refer_to("fc_a_i1", 5) == 5
    for item_id, number in (("msg_a_i0", 5), ("fc_a_i1", 6)):
        with pytest.raises(
            InvalidRequest, match="input: the items to which it refers have more than 4000 characters"
        ):
            await refer_to(item_id, number)


async def test_what_another_version_stored_is_not_there(store: MemoryStore) -> None:
    await store.keep("alice", "resp_a", StoredResponse(b"{}", b'{"turns": []}'))
    with pytest.raises(UnknownPreviousResponse, match="stored by another version of Baton"):
        await reader(store).history_up_to("resp_a")
    with pytest.raises(UnknownResponse, match="another version of Baton"):
        input_items_of(b'{"turns": []}')


def test_input_items_are_listed_as_they_are_kept() -> None:
    own = input_json(items_of(user("one"), {"type": "reasoning", "summary": []}), "r")
    context = "".join(context_pieces(History(), own, ())).encode()
    assert json.loads(context)["num_input"] == 2
    assert input_items_of(context) == own
    assert [item["id"] for item in own] == ["msg_r_i0", "rs_r_i1"]


def test_kept_items_are_the_same_turns_again() -> None:
    items = items_of(
        user("one"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a', "status": "incomplete"},
        {"role": "assistant", "content": "two"},
    )
    assert messages_of(items_of(*input_json(items, "r"))) == messages_of(items)


def test_each_listed_item_has_an_id_of_its_own() -> None:
    items = [user("one", id="x"), user("two", id="x"), user("three"), user("four", id="x")]
    assert [item["id"] for item in input_json(items_of(*items), "r")] == [
        "x", "msg_r_i1", "msg_r_i2", "msg_r_i3",
    ]  # fmt: skip
    foreseen = [user("one", id="msg_r_i1"), user("two"), user("three", id="msg_r_i1")]
    assert len({item["id"] for item in input_json(items_of(*foreseen), "r")}) == 3
