"""GrammarLibrary: the memory of a compiled grammar, and the error for one that cannot be compiled."""

from itertools import pairwise
from pathlib import Path

import pytest

from baton.sampling import GrammarKind, StructuredOutput
from engine.grammars.library import GrammarLibrary
from tests.factories.models import EOS_TOKEN_ID, make_tokenizer


def library_in(folder: Path) -> GrammarLibrary:
    return GrammarLibrary(folder / "tokenizer.json", make_tokenizer().get_vocab_size(), (EOS_TOKEN_ID,))


def test_the_size_of_a_compiled_grammar_is_that_of_its_memory(folder: Path) -> None:
    """The memory grows with the square of this text's length; an estimate by characters would be far off."""
    library = library_in(folder)

    def num_bytes(source: str) -> int:
        return library.compile(StructuredOutput(GrammarKind.REGEX, source)).num_bytes

    sizes = [num_bytes("a?" * count) / 2**20 for count in (1_000, 2_000, 4_000)]
    assert 1.0 < sizes[0] < 5.0
    assert all(3.0 < larger / smaller < 6.0 for smaller, larger in pairwise(sizes)), sizes
    assert num_bytes("(yes|no)") < 2**20


def test_alternatives_that_may_overlap_are_refused_without_naming_an_option_that_clients_lack(
    folder: Path,
) -> None:
    with pytest.raises(ValueError, match=r"^oneOf constraints are not supported\. Use anyOf, or give"):
        library_in(folder).compile(StructuredOutput(GrammarKind.JSON_SCHEMA, '{"oneOf": [{}, {}]}'))


@pytest.mark.parametrize(
    ("kind", "source", "part"),
    [
        (GrammarKind.REGEX, "a(?=b)c", "'(?=' at character 2 of the pattern 'a(?=b)c'"),
        (GrammarKind.LARK, "start: A\nA: /a(?=b)c/", "'(?=' at character 2 of the pattern 'a(?=b)c'"),
        (GrammarKind.JSON_SCHEMA, '{"pattern": "ä(?<!b)", "type": "string"}', "'(?<!' at character 2"),
        (
            GrammarKind.JSON_SCHEMA,
            f'{{"patternProperties": {{"(?!{"x" * 999})": {{}}}}}}',
            "'(?!' at character 1",
        ),
    ],
)
def test_the_part_of_a_pattern_that_no_grammar_can_express_is_named(
    folder: Path, kind: GrammarKind, source: str, part: str
) -> None:
    with pytest.raises(ValueError, match=r"look-around, .*, is not supported: ") as refused:
        library_in(folder).compile(StructuredOutput(kind, source))
    assert part in str(refused.value)
    assert str(refused.value).endswith("; rewrite the pattern without it, or leave the pattern out")


@pytest.mark.parametrize("order", [1, -1])
def test_an_end_token_that_the_model_does_not_have_prevents_no_grammar(folder: Path, order: int) -> None:
    """Some fine-tuned models' tokenizers have more tokens than the model."""
    size = make_tokenizer().get_vocab_size()
    library = GrammarLibrary(folder / "tokenizer.json", size, (EOS_TOKEN_ID, size)[::order])
    assert library.compile(StructuredOutput(GrammarKind.REGEX, "(yes|no)")).num_bytes
    none = GrammarLibrary(folder / "tokenizer.json", size, (size,))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        none.load_tokenizer()
