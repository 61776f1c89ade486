"""A small tokenizer with the markers of model families, and answers that a grammar allows."""

import random

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation.formats import deepseek, glm, harmony_parser, minimax, olmo
from gateway.text.tokenizer import vocabulary_of
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer

MARKERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"),
    *(deepseek.BEGIN, deepseek.END, deepseek.CALL, deepseek.CALL_END, deepseek.SEPARATOR),
    *(*glm.TAGS.tags, minimax.BEGIN, minimax.END, olmo.BEGIN, olmo.END),
    *harmony_parser.TOKENS,
)
CLOSING = frozenset('"}])>,<')
ENDS_OF_VALUES = ("\n</parameter>\n", "</arg_value>")
"""Tokens that random answers prefer. Other answers would never end."""


class Guide:
    """A tokenizer, and grammars for it."""

    def __init__(self, *, has_markers: bool) -> None:
        """`has_markers`: each marker is one special token. Otherwise markers are ordinary text."""
        self.tokenizer: Tokenizer = make_tokenizer()
        if has_markers:
            self.tokenizer.add_tokens(
                [AddedToken(marker, special=True, normalized=False) for marker in MARKERS]
            )
        self.vocabulary = vocabulary_of(self.tokenizer, self.tokenizer.get_vocab().values())
        self.library = llguidance.LLTokenizer(
            self.tokenizer.to_str(), n_vocab=self.tokenizer.get_vocab_size(), eos_token=[EOS_TOKEN_ID]
        )

    def matcher(self, grammar: StructuredOutput) -> llguidance.LLMatcher:
        assert grammar.kind is GrammarKind.LARK
        source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
        matcher = llguidance.LLMatcher(self.library, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, grammar: StructuredOutput, answer: str) -> bool:
        """Whether the grammar allows this answer and its end."""
        matcher = self.matcher(grammar)
        ids = self.tokenizer.encode(answer, add_special_tokens=False).ids
        return bool(
            matcher.validate_tokens(ids) == len(ids) and matcher.try_consume_tokens(ids) == len(ids)
        ) and bool(matcher.is_accepting())

    def random_answer(
        self, grammar: StructuredOutput, rng: random.Random, limit: int = 400
    ) -> tuple[str, bool]:
        """A random answer that the grammar allows, and whether it ended within `limit` tokens."""
        matcher = self.matcher(grammar)
        ids: list[int] = []
        end = max(ENDS_OF_VALUES, key=lambda end: grammar.source.count(end.strip()))
        end_of_value = self.tokenizer.encode(end, add_special_tokens=False).ids
        while len(ids) < limit and not matcher.is_stopped():
            if rng.random() < 0.2 and matcher.validate_tokens(end_of_value) == len(end_of_value):
                assert matcher.try_consume_tokens(end_of_value) == len(end_of_value), matcher.get_error()
                ids += end_of_value
                continue
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
            weights = [self._weight(token_id) for token_id in allowed]
            (token_id,) = rng.choices(allowed, weights)
            assert matcher.consume_token(token_id), matcher.get_error()
            if token_id == EOS_TOKEN_ID:
                break
            ids.append(token_id)
        return self.tokenizer.decode(ids, skip_special_tokens=False), len(ids) < limit

    def _weight(self, token_id: int) -> float:
        if token_id == EOS_TOKEN_ID:
            return 100.0
        return 30.0 if CLOSING & set(self.tokenizer.id_to_token(token_id) or "") else 1.0


GUIDES = {"markers are tokens": Guide(has_markers=True), "markers are text": Guide(has_markers=False)}
both = pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES.keys())
