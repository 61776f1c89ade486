"""TokenParts: which part of an answer each of its tokens belongs to, for usage and log-probabilities.

Events say this of text, which comes later than its tokens and is cut otherwise. So each token's own text goes through a
parser of its own here.
"""

from collections.abc import Sequence

from gateway.conversation import AnswerPart
from gateway.requests.request import GatewayRequest
from gateway.text import Detokenizer, Tokenizer


class TokenParts:
    """For one answer's tokens, in order. Tags count as what they enclose. Answers that are text alone cost nothing."""

    def __init__(self, request: GatewayRequest, tokenizer: Tokenizer) -> None:
        """`request` is a conversation without `keep_special_tokens`."""
        self._parser = request.new_parser()
        self._detokenizer = Detokenizer(
            tokenizer.backend, True, request.prompt_token_ids, tokenizer.kept_tokens
        )
        self.num_reasoning_tokens = 0
        """So far."""

    def parts(self, token_ids: Sequence[int]) -> list[AnswerPart]:
        """One for each token. A token that ends one part and begins the next counts for the first, unless that is
        text."""
        parser = self._parser
        if parser is None:
            return [AnswerPart.TEXT] * len(token_ids)
        parts: list[AnswerPart] = []
        for token_id in token_ids:
            before = parser.part
            parser.push(self._detokenizer.push(token_id))
            parts.append(parser.part if before is AnswerPart.TEXT else before)
        self.num_reasoning_tokens += parts.count(AnswerPart.REASONING)
        return parts
