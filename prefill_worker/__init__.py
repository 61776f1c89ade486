"""The prefill role: computes prompts, samples token 0 and hands the KV cache over."""
