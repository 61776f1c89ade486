"""Log-probabilities in OpenAI's two shapes; knows tokens and their bytes, and no request."""

from collections.abc import Sequence

from baton.request import TokenLogprobs
from gateway.http_api.openai.answers import (
    MIN_LOGPROB,
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    TokenLogprob,
)
from gateway.text import Detokenizer, Tokenizer


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """One entry a token."""
    return ChatLogprobs([_content(tokenizer, token) for token in logprobs])


def _content(tokenizer: Tokenizer, token: TokenLogprobs) -> ContentLogprob:
    one = _one(tokenizer, token.token_id, token.logprob)
    top = [_one(tokenizer, token_id, logprob) for token_id, logprob in token.top]
    return ContentLogprob(one.token, one.logprob, one.bytes, top)


def _one(tokenizer: Tokenizer, token_id: int, logprob: float) -> TokenLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TokenLogprob(raw.decode(errors="replace"), max(logprob, MIN_LOGPROB), list(raw))


class CompletionLogprobsStream:
    """One choice's log-probabilities as its tokens come; counts where each begins in the text."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.backend, skip_special_tokens, prompt_token_ids)
        self._offset = 0

    def push(self, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """A token that only begins a character is where the character is."""
        offsets = []
        for token in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token.token_id))
        return CompletionLogprobs(
            tokens=[token_name(self._tokenizer.token_bytes(token.token_id)) for token in logprobs],
            token_logprobs=[max(token.logprob, MIN_LOGPROB) for token in logprobs],
            top_logprobs=[self._top(token) for token in logprobs],
            text_offset=offsets,
        )

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        return {
            token_name(self._tokenizer.token_bytes(token_id)): max(logprob, MIN_LOGPROB)
            for token_id, logprob in token.top
        }


def token_name(raw: bytes) -> str:
    """A token's text; bytes that are no whole characters in OpenAI's notation, so that no two look alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
