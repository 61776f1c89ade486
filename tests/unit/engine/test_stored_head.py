"""Which projection to logits is used if config.json ties it to the embeddings, and the files have one, too."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.config import BatonConfig
from engine.loading.footprint import footprint
from engine.model_config import read_architecture
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.stepping import StepDriver, load_on_cpu

PROMPT = [(37 * i) % 300 for i in range(20)]
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("changed", [slice(None), slice(299, 300)], ids=["all", "the last row"])
def test_a_projection_that_differs_from_the_embeddings_is_used(tmp_path: Path, changed: slice) -> None:
    """transformers does the same. If the files have no such projection, the embeddings are used, with other results."""
    path = make_model_dir(tmp_path, "gemma2", head_dim=16, sliding_window=9)
    tied = StepDriver(load_on_cpu(path)).generate({"a": PROMPT}, 6)
    head = load_file(path / "model.safetensors")[EMBEDDINGS].clone()
    head[changed] = 3.0 * head[changed].flip(1)
    set_tensors(path, {HEAD: head})
    model = load_on_cpu(path)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, head)
    ours = StepDriver(model).generate({"a": PROMPT}, 6)["a"]
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*PROMPT, *ours]])).logits[0]
    assert ours == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    if changed == slice(None):
        assert ours != tied["a"]
    assert read_architecture(path).tie_word_embeddings
    assert not model.architecture.tie_word_embeddings


def test_it_counts(tmp_path: Path) -> None:
    path, config = (
        make_model_dir(tmp_path, tie_word_embeddings=True),
        BatonConfig.from_mapping({"model": {"dtype": "float32"}}),
    )
    tied = footprint(config, path).weights
    embeddings = load_file(path / "model.safetensors")[EMBEDDINGS]
    for head, num_more in (
        (embeddings.clone(), 0),
        (embeddings.to(torch.bfloat16), 300 * 64),
        (-embeddings, 300 * 64),
    ):
        set_tensors(path, {HEAD: head})
        weights = footprint(config, path).weights
        assert weights is not None
        assert tied is not None
        assert weights.num_parameters == tied.num_parameters + num_more
        assert load_on_cpu(path).architecture.tie_word_embeddings == (num_more == 0)
