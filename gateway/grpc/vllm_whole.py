"""WholeResponse: one whole answer as one response of vLLM's service, serialized while its tokens arrive.

Serializing a message of a hundred thousand tokens at once would block the event loop for a tenth of a second.
Building the message would block it even longer.
"""

from baton.request import TokenLogprobs
from gateway.grpc.generated import vllm_engine_pb2 as pb
from gateway.grpc.vllm_convert import end_without_tokens, input_logprobs_to_message, logprobs_to_message
from gateway.requests.request import Delta, Finish

TOKENS_PER_PIECE = 16
"""Tokens are serialized in pieces of at least this many. Pieces are small, since a hundred other answers may wait."""

_COMPLETE = pb.GenerateResponse.DESCRIPTOR.fields_by_name["complete"].number
_LOGPROBS = pb.GenerateComplete.DESCRIPTOR.fields_by_name["output_logprobs"].number
_INPUT_LOGPROBS = pb.GenerateComplete.DESCRIPTOR.fields_by_name["input_logprobs"].number


class WholeResponse:
    """Call `on_delta` with every delta, then `serialized`.

    The bytes equal those of one message, except that lists of numbers are split into several pieces. Every
    protobuf reader joins these pieces (see "Condensed Encoding of Repeated Fields" in protobuf's encoding
    guide).
    """

    def __init__(self, index: int, first_token_id: int) -> None:
        """`first_token_id`: the prompt's first token."""
        self._index = index
        self._first_token_id: int | None = first_token_id
        """The prompt's first token; None once it is written."""
        self._num_tokens = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._written_ids = bytearray()
        """Serialized part of a GenerateComplete: its token ids."""
        self._written_logprobs = bytearray()
        """Serialized part of an OutputLogProbs."""
        self._written_input_logprobs = bytearray()
        """Serialized part of an InputLogProbs."""

    def on_delta(self, delta: Delta) -> None:
        self._num_tokens += len(delta.token_ids)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        if len(self._token_ids) >= TOKENS_PER_PIECE:
            self._write()
        if delta.prompt_logprobs is not None:
            message = input_logprobs_to_message(tuple(delta.prompt_logprobs), self._first_token_id)
            self._written_input_logprobs += message.SerializeToString()
            self._first_token_id = None

    def serialized(self, finish: Finish) -> bytes:
        """The whole answer as a serialized GenerateResponse."""
        self._write()
        parts: list[bytes | bytearray] = [
            self._written_ids,
            end_without_tokens(self._index, self._num_tokens, finish).SerializeToString(),
        ]
        for field, written in (
            (_LOGPROBS, self._written_logprobs),
            (_INPUT_LOGPROBS, self._written_input_logprobs),
        ):
            if written:
                parts += [_header(field, len(written)), written]
        return b"".join((_header(_COMPLETE, sum(map(len, parts))), *parts))

    def _write(self) -> None:
        self._written_ids += pb.GenerateComplete(output_ids=self._token_ids).SerializeToString()
        if (logprobs := logprobs_to_message(self._logprobs)) is not None:
            self._written_logprobs += logprobs.SerializeToString()
        self._token_ids.clear()
        self._logprobs.clear()


def _header(field: int, length: int) -> bytes:
    """The header of an embedded message: its field number and its length."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
