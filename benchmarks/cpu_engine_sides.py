"""Engines that compute prompts and decode steps on a CPU when they get an order, each in its own process.

    PYTHON -m benchmarks.cpu_engine_sides SIDE MODEL DTYPE THREADS

SIDE is baton, transformers, vllm or llama. PYTHON is an interpreter with this engine. MODEL is a Hugging Face
folder, or for llama a GGUF file. For baton, DTYPE may also be int8, int4 or gguf. For llama, DTYPE is gguf.
Orders and answers are lines of JSON (`benchmarks/peer.py`):

    {"prompts": [[17, 4, ...], ...], "decode_tokens": 16}     {"prefill_s": 0.31, "decode_s": 0.022}

`prefill_s` is the time to the first tokens of all prompts. `decode_s` is the time of one later step of all
prompts. If `decode_tokens` is 0, only the prefill is computed. {"prompts": null} requests the vocabulary's
size and a version.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# Every side imports only its own engine, which may be installed in another environment.

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peer import Order, serve

Prompts = list[list[int]]
BLOCK_SIZE = 16
MAX_TOKENS = 16_384
"""All requests of an order together may have at most this many prompt and answer tokens."""
MAX_NUM_SEQS = 64


class Side(Protocol):
    vocab_size: int
    version: str

    def seconds(self, prompts: Prompts, num_tokens: int) -> list[float]:
        """Generates `num_tokens` tokens for each prompt. Returns the seconds of each step, or the seconds of all steps
        as one entry if single steps are not visible."""
        ...


class BatonSide:
    """Baton's engine without its threads and sockets: scheduler, runner, sampler."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        from baton.system.cpus import let_openmp_sleep

        let_openmp_sleep()  # as a worker does
        import torch

        from baton.config import BatonConfig, ModelConfig, SchedulerConfig
        from engine.allocator import keep_freed_memory
        from engine.kv_cache import KVPool
        from engine.loading.dtype import ChosenDtype, choose_dtype
        from engine.loading.loader import load_model
        from engine.runner_parts import make_runner
        from kv_transfer import SharedMemory
        from scheduler import Scheduler

        keep_freed_memory()  # as a worker does
        torch.set_num_threads(threads)
        own = {"gguf": "auto", "int8": "int8", "int4": "int4"}.get(dtype)
        chosen = ChosenDtype(dtype) if own is None else choose_dtype(BatonConfig(), Path(model))
        config = ModelConfig.model_validate({"dtype": chosen.dtype, "quantization": own or "none"})
        loaded = load_model(config, Path(model), torch.device("cpu"), kv_cache_dtype=chosen.kv_cache_dtype)
        num_blocks = MAX_TOKENS // BLOCK_SIZE + 2
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=MAX_TOKENS,
                max_num_seqs=MAX_NUM_SEQS,
                max_model_len=loaded.max_model_len,
                num_blocks=num_blocks,
                enable_prefix_caching=False,
                block_size=BLOCK_SIZE,
            )
        )
        shape = loaded.kv_block_shape(BLOCK_SIZE)
        # As in a worker: shared memory, which causes no page faults while the engine serves.
        memory = SharedMemory(num_blocks * shape.size_bytes)
        pool = KVPool(num_blocks, shape, loaded.device, memory.array)
        self._runner = make_runner(loaded, pool)
        self.vocab_size = loaded.vocab_size
        self.version = f"torch {torch.__version__}"

    def seconds(self, prompts: Prompts, num_tokens: int) -> list[float]:
        from baton.sampling import SamplingParams
        from scheduler import Request

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._scheduler.add_request(Request(str(number), prompt, params))
        seconds = []
        while self._scheduler.has_requests():
            start = time.perf_counter()
            plan = self._scheduler.schedule()
            self._scheduler.update_from_output(plan, self._runner.execute(plan))
            seconds.append(time.perf_counter() - start)
        self._runner.execute(self._scheduler.schedule())  # the runner forgets the requests
        return seconds[:num_tokens]


class TransformersSide:
    """transformers' `generate`, greedy, with its default KV cache and attention."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        )
        self.vocab_size = self._model.config.vocab_size
        self.version = f"{transformers.__version__}, torch {torch.__version__}"

    def seconds(self, prompts: Prompts, num_tokens: int) -> list[float]:
        import torch

        input_ids = torch.tensor(prompts)
        times = [time.perf_counter()]

        def note(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            """Notes the time. transformers calls this function after every step, as a criterion to stop; it never stops
            the answer."""
            times.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool)

        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            stopping_criteria=[note],
        )
        return [end - begin for begin, end in pairwise(times)]


class VllmSide:
    """vLLM's `LLM.generate` with vLLM's own CPU settings. A step has room for all prompts of an order."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import os

        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            model=model,
            dtype=dtype,
            max_model_len=4096,
            enable_prefix_caching=False,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=MAX_NUM_SEQS,
        )
        self.vocab_size = self._llm.llm_engine.model_config.get_vocab_size()
        self.version = vllm.__version__

    def seconds(self, prompts: Prompts, num_tokens: int) -> list[float]:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        num_of = dict.fromkeys(map(str, range(len(prompts))), 0)
        times = [time.perf_counter()]
        for name, prompt in zip(num_of, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            is_full = max(num_of.values()) < num_tokens
            for output in engine.step():
                num_of[output.request_id] = len(output.outputs[0].token_ids)
            # The first steps may have only some of the prompts, which then end first. The last steps do not count.
            if is_full and min(num_of.values()) >= len(times):
                times.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(times)]


class LlamaSide:
    """llama.cpp's server through xllamacpp. It gets one prompt at a time, and measures with its own clock."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import xllamacpp

        assert dtype == "gguf", "the file says which"
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx, params.n_batch = 4096, 2048
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)
        self.vocab_size = 1 << 14
        """Tokens of an order are drawn from this range. A GGUF file's vocabulary is larger."""
        self.version = f"xllamacpp {getattr(xllamacpp, '__version__', '?')}"

    def seconds(self, prompts: Prompts, num_tokens: int) -> list[float]:
        (prompt,) = prompts
        request = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer: Any = self._server.handle_completions(request)
        timings = answer["timings"]
        return [timings["prompt_ms"] / 1e3 + timings["predicted_ms"] / 1e3]


SIDES: dict[str, Any] = {
    "baton": BatonSide,
    "transformers": TransformersSide,
    "vllm": VllmSide,
    "llama": LlamaSide,
}


def measure(side: Side, prompts: Prompts, decode_tokens: int) -> Order:
    """Measures one order.

    If the time of a step is not visible, it is computed from a long and a short answer: in the difference,
    the prefill cancels out.
    """
    if decode_tokens == 0:
        return {"prefill_s": sum(side.seconds(prompts, 1))}
    seconds = side.seconds(prompts, decode_tokens + 1)
    if len(seconds) > 1:
        return {"prefill_s": seconds[0], "decode_s": statistics.mean(seconds[1:])}
    first_s = sum(side.seconds(prompts, 1))
    return {"prefill_s": first_s, "decode_s": (seconds[0] - first_s) / decode_tokens}


def main() -> None:
    name, model, dtype, threads = sys.argv[1:]
    side: Side = SIDES[name](model, dtype, int(threads))

    def answer(order: Order) -> Order:
        if order["prompts"] is None:
            return {"vocab_size": side.vocab_size, "version": side.version}
        return measure(side, order["prompts"], order["decode_tokens"])

    serve(answer)


if __name__ == "__main__":
    main()
