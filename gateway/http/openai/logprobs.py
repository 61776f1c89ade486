"""Log-probabilities in OpenAI's two shapes, as JSON in pieces; knows tokens and their bytes, but no request.

A token may come with twenty others, and a request may have a hundred thousand tokens. An object for each would cost
14 KiB per token and block the event loop. So they are kept as numbers, and each token's JSON is cached.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from pydantic_core import to_json

from baton.request import TokenLogprobs
from gateway.http.openai.answers import MIN_LOGPROB
from gateway.http.whole_json import json_string
from gateway.text import Detokenizer, Tokenizer

TOKENS_PER_PIECE = 48
"""With MAX_LOGPROBS each, a thousand numbers: some 0.3 ms."""

MAX_REMEMBERED = 2**14
"""Number of cached tokens; a few hundred bytes each."""


class LogprobColumns:
    """Log-probabilities at many positions: the sampled token's, then those of the likeliest ones; 12 bytes each."""

    __slots__ = ("_begins", "_logprobs", "_token_ids")

    def __init__(self, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self._token_ids = array("I")
        self._logprobs = array("d")
        self._begins = array("I", [0])
        self.extend(logprobs)

    def __len__(self) -> int:
        """Positions."""
        return len(self._begins) - 1

    def extend(self, logprobs: Sequence[TokenLogprobs]) -> None:
        for position in logprobs:
            self._token_ids.append(position.token_id)
            self._logprobs.append(position.logprob)
            if position.top:
                token_ids, values = zip(*position.top, strict=True)
                self._token_ids.extend(token_ids)
                self._logprobs.extend(values)
            self._begins.append(len(self._token_ids))

    def pieces(self) -> "Iterator[list[Row]]":
        """All positions, a few at a time."""
        for first in range(0, len(self), TOKENS_PER_PIECE):
            begins = self._begins[first : first + TOKENS_PER_PIECE + 1]
            begin, end = begins[0], begins[-1]
            token_ids, numbers = self._token_ids[begin:end], _numbers(self._logprobs[begin:end])
            yield [
                (token_ids[a - begin : b - begin], numbers[a - begin : b - begin])
                for a, b in pairwise(begins)
            ]


Row = tuple[Sequence[int], Sequence[str]]
"""One position: tokens, and their log-probabilities in JSON."""


def _numbers(logprobs: Sequence[float]) -> list[str]:
    """Numbers in JSON; one call for many takes a tenth of the time."""
    bounded = [max(logprob, MIN_LOGPROB) for logprob in logprobs]
    return to_json(bounded, inf_nan_mode="null")[1:-1].decode().split(",")


def _list(before: str, columns: LogprobColumns, write: Callable[[Row], str]) -> Iterator[str]:
    """The positions after `before`, which opens a list, separated by commas."""
    yield before
    comma = ""
    for rows in columns.pieces():
        yield comma + ",".join(map(write, rows))
        comma = ","


class ChatTokens:
    """A chat's log-probabilities; one instance serves all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around = lru_cache(MAX_REMEMBERED)(self._write_around)

    def write(self, columns: LogprobColumns) -> Iterator[str]:
        """ChatLogprobs in pieces."""
        yield from _list('{"content":[', columns, self._content)
        yield '],"refusal":null}'

    def positions(self, columns: LogprobColumns) -> Iterator[str]:
        """The list within ChatLogprobs, in pieces."""
        yield from _list("[", columns, self._content)
        yield "]"

    def _content(self, row: Row) -> str:
        one, *top = map(self._token, *row)
        return f'{one},"top_logprobs":[{",".join([token + "}" for token in top])}]}}'

    def _token(self, token_id: int, number: str) -> str:
        """All but the closing brace, since the position continues with more."""
        before, behind = self._around(token_id)
        return f"{before}{number}{behind}"

    def _write_around(self, token_id: int) -> tuple[str, str]:
        raw = self._tokenizer.token_bytes(token_id)
        name = json_string(raw.decode(errors="replace"))
        return f'{{"token":{name},"logprob":', f',"bytes":[{",".join(map(str, raw))}]'


class CompletionTokens:
    """Token names in completions; one instance serves all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name = lru_cache(MAX_REMEMBERED)(self._write_name)
        """A token's name by its id, in JSON."""

    def _write_name(self, token_id: int) -> str:
        return json_string(token_name(self.tokenizer.token_bytes(token_id)))


class CompletionLogprobsStream:
    """One choice's log-probabilities as its tokens arrive; tracks where each begins in the text."""

    def __init__(
        self, tokens: CompletionTokens, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._name = tokens.name
        self._detokenizer = Detokenizer(tokens.tokenizer.backend, skip_special_tokens, prompt_token_ids)
        self._offset = 0

    def write(self, columns: LogprobColumns) -> Iterator[str]:
        """CompletionLogprobs in pieces, for tokens that follow those written before."""
        lists = (
            ('{"tokens":[', self._token),
            ('],"token_logprobs":[', _own_number),
            ('],"top_logprobs":[', self._top),
            ('],"text_offset":[', self._next_offset),
        )
        for before, write in lists:
            yield from _list(before, columns, write)
        yield "]}"

    def _token(self, row: Row) -> str:
        return self._name(row[0][0])

    def _top(self, row: Row) -> str:
        """Two tokens may have the same name; the later one's number stays."""
        named = {
            self._name(token_id): number for token_id, number in zip(row[0][1:], row[1][1:], strict=True)
        }
        return f"{{{','.join([f'{name}:{number}' for name, number in named.items()])}}}"

    def _next_offset(self, row: Row) -> str:
        """A token that only begins a character has that character's offset."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(row[0][0]))
        return str(offset)


def _own_number(row: Row) -> str:
    return row[1][0]


def token_name(raw: bytes) -> str:
    """A token's text; bytes that are no whole characters in OpenAI's notation, so that no two look alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
