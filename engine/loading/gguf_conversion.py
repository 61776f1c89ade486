"""GGUF -> Hugging Face folder, as a command of its own, so that no other process pays for importing transformers.

    python -m engine.loading.gguf_conversion MODEL.gguf FOLDER

Prints one line per step. Weights are dequantised to bf16; tokenizer and chat template come from the GGUF, too.
"""

import os
import sys
from pathlib import Path


def main(gguf: Path, folder: Path) -> None:
    """Converts; any failure is an exception whose last line says why."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file; a hub look-up could only hang
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    print("dequantising the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Otherwise transformers keeps the packed GGUF tensors, which cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    print("writing the folder")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
