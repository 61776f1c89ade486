"""Writes log-probabilities in OpenAI's two shapes and vLLM's, as JSON in pieces.

Each token may have the log-probabilities of twenty others, and a request may have a hundred thousand tokens. One object
for each log-probability would cost 14 KiB per token, and block the event loop. So log-probabilities are stored as
numbers, and each token's JSON is cached.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from pydantic_core import to_json

from baton.request import TokenLogprobs
from gateway.http.openai.answers import MIN_LOGPROB
from gateway.http.openai.echo import EchoedPrompt
from gateway.http.whole_json import json_string
from gateway.text import Detokenizer, Tokenizer, num_before

TOKENS_PER_PIECE = 48
"""With MAX_LOGPROBS log-probabilities for each token, a piece has a thousand numbers, and takes about 0.3 ms to
make."""

MAX_REMEMBERED = 2**14
"""The JSON of at most this many tokens is cached. Each takes a few hundred bytes."""


class LogprobColumns:
    """Log-probabilities at many positions. Each position has the log-probability of its own token, then those of the
    most likely tokens.

    Each log-probability takes 12 bytes, with its token id.
    """

    __slots__ = ("_begins", "_logprobs", "_token_ids")

    def __init__(self, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self._token_ids = array("I")
        self._logprobs = array("d")
        self._begins = array("I", [0])
        self.extend(logprobs)

    def __len__(self) -> int:
        """The number of positions."""
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
        """All positions, in lists of at most TOKENS_PER_PIECE."""
        for first in range(0, len(self), TOKENS_PER_PIECE):
            begins = self._begins[first : first + TOKENS_PER_PIECE + 1]
            begin, end = begins[0], begins[-1]
            token_ids, numbers = self._token_ids[begin:end], _numbers(self._logprobs[begin:end])
            yield [
                (token_ids[a - begin : b - begin], numbers[a - begin : b - begin])
                for a, b in pairwise(begins)
            ]


Row = tuple[Sequence[int], Sequence[str]]
"""One position: its token ids, and their log-probabilities as JSON numbers."""


def _numbers(logprobs: Sequence[float]) -> list[str]:
    """The log-probabilities as JSON numbers. One call for all takes a tenth of the time of many calls."""
    bounded = [max(logprob, MIN_LOGPROB) for logprob in logprobs]
    return to_json(bounded, inf_nan_mode="null")[1:-1].decode().split(",")


class PromptLogprobs:
    """Log-probabilities of all tokens of a prompt except the first, with the ranks of these tokens."""

    __slots__ = ("_columns", "_ranks")

    def __init__(self) -> None:
        self._columns = LogprobColumns()
        self._ranks = array("I")

    def extend(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._columns.extend(logprobs)
        self._ranks.extend([position.rank for position in logprobs])

    def pieces(self) -> "Iterator[list[tuple[Row, int]]]":
        """All positions, each with its rank, in lists of at most TOKENS_PER_PIECE."""
        ranks = iter(self._ranks)
        for rows in self._columns.pieces():
            yield [(row, next(ranks)) for row in rows]


def _list(
    before: str, columns: LogprobColumns, write: Callable[[Row], str], first: str = ""
) -> Iterator[str]:
    """The text `before`, which opens a list, then `first` and the positions, separated by commas."""
    yield before + first
    comma = "," if first else ""
    for rows in columns.pieces():
        yield comma + ",".join(map(write, rows))
        comma = ","


class ChatTokens:
    """Writes the log-probabilities of chats. One instance serves all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around = lru_cache(MAX_REMEMBERED)(self._write_around)

    def write(self, columns: LogprobColumns) -> Iterator[str]:
        """The JSON of ChatLogprobs, in pieces."""
        yield from _list('{"content":[', columns, self._content)
        yield '],"refusal":null}'

    def positions(self, columns: LogprobColumns) -> Iterator[str]:
        """The JSON of the list in ChatLogprobs, in pieces."""
        yield from _list("[", columns, self._content)
        yield "]"

    def _content(self, row: Row) -> str:
        one, *top = map(self._token, *row)
        return f'{one},"top_logprobs":[{",".join([token + "}" for token in top])}]}}'

    def _token(self, token_id: int, number: str) -> str:
        """A token's JSON object without its closing brace, because further keys may follow."""
        before, after = self._around(token_id)
        return f"{before}{number}{after}"

    def _write_around(self, token_id: int) -> tuple[str, str]:
        raw = self._tokenizer.token_bytes(token_id)
        name = json_string(raw.decode(errors="replace"))
        return f'{{"token":{name},"logprob":', f',"bytes":[{",".join(map(str, raw))}]'


class CompletionTokens:
    """Writes the names of tokens in completions. One instance serves all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name = lru_cache(MAX_REMEMBERED)(self._write_name)
        """Returns a token's name as a JSON string, by the token's id."""

    def _write_name(self, token_id: int) -> str:
        return json_string(token_name(self.tokenizer.token_bytes(token_id)))


class CompletionLogprobsStream:
    """Writes one choice's log-probabilities while its tokens arrive. Tracks where each token begins in the
    text."""

    def __init__(
        self,
        tokens: CompletionTokens,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int],
        echo: EchoedPrompt | None = None,
    ) -> None:
        """`echo`: the prompt, if its tokens come before those of the answer."""
        self._echo = echo
        self._name = tokens.name
        self._bytes_of = tokens.tokenizer.token_bytes
        self._detokenizer = Detokenizer(tokens.tokenizer.backend, skip_special_tokens, prompt_token_ids)
        self._offset = 0 if echo is None else len(echo.text)

    def write(self, columns: LogprobColumns) -> Iterator[str]:
        """The JSON of CompletionLogprobs in pieces. `columns`: the tokens after those of the last call. The first call
        adds the first token of an echoed prompt, which has no log-probabilities."""
        first = ("", "", "", "")
        if self._echo is not None and (first_id := self._echo.take_first()) is not None:
            first = (self._name(first_id), "null", "null", "0")
        lists = (
            ('{"tokens":[', self._token),
            ('],"token_logprobs":[', _own_number),
            ('],"top_logprobs":[', self._top),
            ('],"text_offset":[', self._next_offset),
        )
        for (before, write), beginning in zip(lists, first, strict=True):
            yield from _list(before, columns, write, beginning)
        yield "]}"

    def _token(self, row: Row) -> str:
        return self._name(row[0][0])

    def _top(self, row: Row) -> str:
        """The token itself and the most likely ones as a JSON object, as in OpenAI's API and vLLM's. If two tokens have
        the same name, the first one stays."""
        named: dict[str, str] = {}
        for token_id, number in zip(*row, strict=True):
            named.setdefault(self._name(token_id), number)
        return f"{{{','.join([f'{name}:{number}' for name, number in named.items()])}}}"

    def _next_offset(self, row: Row) -> str:
        """Where the token begins. A token that contains only a part of a character has that character's
        offset."""
        if self._echo is not None and self._echo.num_remaining:
            return str(self._echo.next_offset(row[0][0]))
        offset, token_id = self._offset, row[0][0]
        text = self._detokenizer.push(token_id)
        self._offset += len(text)
        return str(offset + num_before(text, self._bytes_of(token_id)))


def _own_number(row: Row) -> str:
    return row[1][0]


class RankedTokens:
    """Writes log-probabilities of prompts, with ranks, in vLLM's shape. One instance serves all answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around = lru_cache(MAX_REMEMBERED)(self._write_around)

    def write(self, logprobs: PromptLogprobs) -> Iterator[str]:
        """The JSON of a list of PromptLogprob by token id, in pieces. The prompt's first token has null."""
        yield "[null"
        for rows in logprobs.pieces():
            yield "".join([f",{self._position(row, rank)}" for row, rank in rows])
        yield "]"

    def _position(self, row: Row, own_rank: int) -> str:
        """The JSON of one position: the token itself, then the most likely tokens in order, without the token
        itself."""
        entries = {row[0][0]: self._entry(row[0][0], row[1][0], own_rank)}
        for rank, (token_id, number) in enumerate(zip(row[0][1:], row[1][1:], strict=True), 1):
            if token_id not in entries:
                entries[token_id] = self._entry(token_id, number, rank)
        return f"{{{','.join(entries.values())}}}"

    def _entry(self, token_id: int, number: str, rank: int) -> str:
        before, after = self._around(token_id)
        return f'{before}{number},"rank":{rank}{after}'

    def _write_around(self, token_id: int) -> tuple[str, str]:
        name = json_string(self._tokenizer.token_bytes(token_id).decode(errors="replace"))
        return f'"{token_id}":{{"logprob":', f',"decoded_token":{name}}}'


def token_name(raw: bytes) -> str:
    """A token's text. If its bytes are not whole characters, they are written in OpenAI's notation, so that
    different tokens have different names."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
