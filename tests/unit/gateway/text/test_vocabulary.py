"""`vocabulary_of`: what a grammar may name, in little memory."""

import gc
import tracemalloc

from tokenizers import AddedToken, Tokenizer, models

from gateway.text.tokenizer import vocabulary_of

NUM_TOKENS = 20_000


def test_a_vocabulary_keeps_few_bytes_for_each_token() -> None:
    """A dictionary would keep more than a hundred."""
    backend = Tokenizer(models.WordLevel({f"token{i}": i for i in range(NUM_TOKENS)}, unk_token="token0"))
    backend.add_tokens([AddedToken("<end>", special=True), AddedToken("<word>", special=False)])
    tracemalloc.start()
    try:
        vocabulary = vocabulary_of(backend, backend.get_vocab().values())
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 16 * NUM_TOKENS
    assert list(map(vocabulary.id_of, ("token7", "<end>", "<word>", "other"))) == [
        7,
        NUM_TOKENS,
        NUM_TOKENS + 1,
        None,
    ]
    assert vocabulary.text_ids_except(7) == f"0-6,8-{NUM_TOKENS - 1},{NUM_TOKENS + 1}-{NUM_TOKENS + 1}"
