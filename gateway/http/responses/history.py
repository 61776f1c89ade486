"""History: the stored responses that a request continues.

A history has the same bounds as a conversation that is sent whole.

A stored response contains its own items, and the ids of the responses before it. So a chain of n responses
stores n turns, not n^2, and reading the chain takes two round trips.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from baton.errors import InvalidRequest, UnknownPreviousResponse, UnknownResponse
from gateway.http.body import Body
from gateway.http.responses.items import (
    MAX_ITEMS,
    PREFIXES,
    FunctionCallItem,
    InputItem,
    ItemReference,
    KeptItem,
    ReasoningItem,
    as_kept,
)
from gateway.http.responses.output import OutputItem
from gateway.http.responses.store import ResponseStore
from gateway.turn_budget import TurnBudget

MAX_ANCESTORS = 1024
"""A response may continue a chain of at most this many responses."""
MAX_REFERRED = 64
"""One request may refer to items of at most this many stored responses. Responses that it continues do not count."""

_WITHOUT_STORE = "this gateway keeps no responses (gateway.response_store: none)"
_ITEM_ID = re.compile(r"(?:msg|fc|fco|rs)_(.+)_i?\d{1,6}", re.DOTALL)


class StoredContext(Body):
    """The part of a stored response that later responses need."""

    ancestors: list[str]
    """Ids of the responses before this one, the oldest first."""
    num_input: int
    """The first `num_input` items are the response's own input; the others are its output."""
    items: list[InputItem]


@dataclass(frozen=True, slots=True)
class History:
    """The responses that a request continues."""

    ancestors: tuple[str, ...] = ()
    """Ids of the stored responses, the oldest first. The last one is the response that the request
    continues."""
    items: tuple[KeptItem, ...] = ()


class HistoryReader:
    """Reads one caller's stored responses for one request."""

    def __init__(
        self,
        store: ResponseStore | None,
        caller: str,
        max_bytes: int,
        hold: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`max_bytes`: at most this many bytes may be read for this request. Its references may stand for as many
        characters, since a request may refer to one item many times. `hold` is called with the bytes that are read; it
        may raise an error if the caller's requests hold too many."""
        self._store = store
        self._caller = caller
        self._max_bytes = max_bytes
        self._remaining_bytes = max_bytes
        self._hold = hold
        self._budget = TurnBudget()

    async def history_up_to(self, previous_response_id: str | None) -> History:
        """The history up to and including a stored response. Raises UnknownPreviousResponse if a part is
        missing."""
        if previous_response_id is None:
            return History()
        (last,) = await self._contexts([previous_response_id])
        ancestors = () if last is None else tuple(last.ancestors)
        if len(ancestors) >= MAX_ANCESTORS:
            raise self._too_long(f"{len(ancestors)} responses")
        earlier = await self._contexts(ancestors)
        items: list[KeptItem] = []
        ids = (*ancestors, previous_response_id)
        for response_id, context in zip(ids, (*earlier, last), strict=True):
            if context is None:
                raise UnknownPreviousResponse(
                    "previous_response_id", _missing(response_id, previous_response_id)
                )
            items += _without_references(context.items)
        if len(items) > MAX_ITEMS:
            raise self._too_long(f"{len(items)} items")
        return History(ids, tuple(items))

    async def resolve(self, items: Sequence[InputItem], history: History) -> list[KeptItem]:
        """The items, with each reference replaced by the stored item to which it refers. Raises UnknownResponse if a
        stored item is missing; the error names the reference's field."""
        wanted = {item.id for item in items if isinstance(item, ItemReference)}
        if not wanted:
            return list(_without_references(items))
        found = {item.id: item for item in history.items if item.id in wanted}
        response_ids = sorted(
            {match[1] for item_id in wanted - set(found) if (match := _ITEM_ID.fullmatch(item_id))}
        )
        if len(response_ids) > MAX_REFERRED:
            raise InvalidRequest(
                "input",
                f"refers to items of {len(response_ids)} responses; at most {MAX_REFERRED} are allowed",
            )
        stored = [] if self._store is None else [f"resp_{each}" for each in response_ids]
        for context in await self._contexts(stored):
            found |= {
                item.id: item
                for item in _without_references(context.items if context else ())
                if item.id in wanted
            }
        lengths = {item_id: num_characters(item) for item_id, item in found.items()}
        references = (item.id for item in items if isinstance(item, ItemReference))
        if sum(lengths.get(item_id, 0) for item_id in references) > self._max_bytes:
            raise InvalidRequest(
                "input",
                f"the items to which it refers have more than {self._max_bytes} characters together "
                "(gateway.max_message_mib); refer to fewer items, and to each only once",
            )
        resolved: list[KeptItem] = []
        for index, item in enumerate(items):
            if not isinstance(item, ItemReference):
                resolved.append(item)
            elif item.id in found:
                resolved.append(found[item.id])
            else:
                missing = f"no stored item has the id '{item.id[:60]}'"
                raise UnknownResponse(f"input.{index}.id", _WITHOUT_STORE if self._store is None else missing)
        return resolved

    async def _contexts(self, response_ids: Sequence[str]) -> list[StoredContext | None]:
        if not response_ids:
            return []
        if self._store is None:
            raise UnknownPreviousResponse("previous_response_id", _WITHOUT_STORE)
        contexts = []
        for text in await self._store.contexts(self._caller, response_ids):
            self._remaining_bytes -= len(text or b"")
            if self._remaining_bytes < 0:
                raise self._too_long("more bytes than one message may have (gateway.max_message_mib)")
            self._hold(len(text or b""))
            contexts.append(None if text is None else _parsed(text))
            await self._budget.pause_if_spent()
        return contexts

    def _too_long(self, length: str) -> InvalidRequest:
        return InvalidRequest(
            "previous_response_id",
            f"the conversation has {length}; begin a new conversation, with a summary of this one",
        )


def input_json(items: Sequence[KeptItem], request_id: str) -> list[dict[str, Any]]:
    """A request's own items as they are stored, each with an id of its own. If an earlier item has the same id, the
    later item gets another one."""
    kept: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(items):
        defaults = (f"{PREFIXES[type(item)]}_{request_id}_i{n}" for n in count(number, len(items)))
        ids = chain([item.id] if item.id else [], defaults)
        item_id = next(each for each in ids if each not in kept)
        kept[item_id] = as_kept(item, item_id)
    return list(kept.values())


def context_pieces(
    history: History, own: Sequence[dict[str, Any]], output: Iterable[OutputItem]
) -> Iterator[str]:
    """The JSON of a StoredContext, in pieces. `own`: the result of `input_json`."""
    yield f'{{"ancestors":{to_json(history.ancestors).decode()},"num_input":{len(own)},"items":['
    comma = ""
    for item in own:
        yield comma + to_json(item).decode()
        comma = ","
    for each in output:
        yield comma
        yield from each.context_json()
        comma = ","
    yield "]}"


def input_items_of(context: bytes) -> list[dict[str, Any]]:
    """The input items that a stored response's own request had, as `input_json` wrote them. Raises UnknownResponse if
    another version of Baton stored it in another form."""
    if (stored := _parsed(context)) is None:
        raise UnknownResponse(
            "response_id",
            "another version of Baton stored this response, and this version cannot read its items",
        )
    return input_json(list(_without_references(stored.items[: stored.num_input])), "")


def num_characters(item: KeptItem) -> int:
    """The number of characters of the item's texts."""
    match item:
        case FunctionCallItem():
            return len(item.arguments)
        case ReasoningItem():
            return sum(len(part.text) for part in (*(item.content or ()), *(item.summary or ())))
        case _:
            return len(item.text)


def _without_references(items: Iterable[InputItem]) -> Iterator[KeptItem]:
    return (item for item in items if not isinstance(item, ItemReference))


def _parsed(text: bytes) -> StoredContext | None:
    """The stored context. None if another version of Baton stored it in another form."""
    try:
        return StoredContext.model_validate_json(text)
    except ValidationError:
        return None


def _missing(response_id: str, previous_response_id: str) -> str:
    which = "it" if response_id == previous_response_id else f"'{response_id[:80]}', which it continues,"
    return (
        f"'{previous_response_id[:80]}' cannot be continued: {which} was never stored, was deleted or displaced, is "
        "too old, or was stored by another version of Baton; send the whole conversation as input"
    )
