"""Model architectures, written out literally; knows no request and no block table."""

from engine.models.llama import LlamaForCausalLM

__all__ = ["LlamaForCausalLM"]
