"""Tiny random models as complete Hugging Face folders: config, weights, tokenizer, chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN_ID = 2
CORPUS = [
    "The cache is the baton: one worker computes the prompt, another one carries on.",
    "A block is one contiguous span of bytes, and a request holds a table of blocks.",
    "What is the capital of France? The capital of France is Paris, and it lies on the Seine.",
    "One, two, three, four, five, six, seven, eight, nine, ten. The quick brown fox jumps over the lazy dog.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WINDOWED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
"""Overrides for a `qwen2` with three KV groups, of which two have a window."""


def make_model_dir(path: Path, architecture: str = "llama", **overrides: Any) -> Path:
    """Fills `path` with a tiny random model of `architecture` (`llama`, `mistral`, `qwen2`, `qwen3`).

    `overrides` are passed to the transformers config. `seed` selects other weights. `dtype` (a name such as
    "bfloat16") is the stored dtype, by default float32. Biases and norm weights are random too, so that a
    model that forgets one of them gives different tokens. The vocabulary is the tokenizer's, unless
    `vocab_size` is given.
    """
    path.mkdir(parents=True, exist_ok=True)
    seed, dtype = overrides.pop("seed", 0), overrides.pop("dtype", "float32")
    tokenizer = make_tokenizer()
    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        **overrides,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings))
    _randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _write_tokenizer(path, tokenizer)
    return path


def set_tensors(folder: Path, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Adds tensors to a model's file, or replaces them; None removes one."""
    file = folder / "model.safetensors"
    changed = {**load_file(file), **tensors}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


def make_draft_pair(path: Path, num_layers: int = 6, num_first: int = 2) -> tuple[Path, Path]:
    """Folders of a model whose last layers change little, and of a model that has only its first layers."""
    whole = make_model_dir(path / "whole", num_hidden_layers=num_layers)
    first = make_model_dir(path / "first", num_hidden_layers=num_first)
    tensors = load_file(whole / "model.safetensors")
    for layer in range(num_first, num_layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] *= 0.1
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    firsts = {name: tensors[name] for name in load_file(first / "model.safetensors")}
    save_file(firsts, first / "model.safetensors", {"format": "pt"})
    return whole, first


def make_tokenizer_dir(path: Path, chat_template: str | None = None) -> Path:
    """A folder with a tokenizer and no model. With `chat_template` None, it has the usual template."""
    path.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(path, make_tokenizer())
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return path


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE with 300 tokens, the same in every process. Any text survives encode and decode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Makes weights so large that every token and position matters, however transformers initializes them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias")]
        for name, parameter in sorted((*model.named_parameters(), *biases)):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(2.0 * noise / parameter.shape[-1] ** 0.5)


def _write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
