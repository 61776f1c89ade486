"""The common frame of both shapes of whole answers, as JSON in pieces."""

from collections.abc import Iterable, Iterator

from pydantic_core import to_json

from gateway.http.openai.answers import Usage
from gateway.http.openai.events import Head, usage_json


def whole_answer(
    head: Head, object_name: str, choices: Iterable[Iterator[str]], usage: Usage
) -> Iterator[str]:
    """Choices in order, each in pieces of its own."""
    start = {"id": head.id, "object": object_name, "created": head.created, "model": head.model}
    yield f'{to_json(start).decode()[:-1]},"choices":['
    for index, choice in enumerate(choices):
        yield f'{"," if index else ""}{{"index":{index},'
        yield from choice
    yield f'],"usage":{usage_json(usage)}}}'
