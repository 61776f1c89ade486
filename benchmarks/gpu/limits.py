"""How long each part of the check may run.

A part, together with its start and the start of another part, fits in a command of ten minutes.
"""

PART_LIMITS_S = {
    "smoke": 60.0,  # eight processes compile its launches; a broken device may hang
    "kernels": 540.0,  # `few` needs a minute or two; `many` may need more, and then keeps its results so far
    "attention": 180.0,  # three runs of 25 tests; the first run compiles
    "marked": 180.0,  # some 30 tests; most of them start processes that load PyTorch
    "tokens": 300.0,  # four models, each in five ways; torch computes the reference tokens on the host
    "handover": 300.0,  # two clusters of processes with 36 answers each, then blocks between two processes
    "served": 400.0,  # three fleets, each of three workers that compile their kernels
    "throughput": 300.0,  # an engine, then two fleets; each worker compiles its kernels
    "decode": 420.0,  # one model with four batches and two contexts, then its switches: three minutes each
    "overlap": 180.0,  # one model, one batch; the trace is written once
    "prefill": 300.0,  # three models, eight sizes, about eight rounds each
    "peer": 420.0,  # torch.compile alone takes one to three minutes
    "sweep": 540.0,  # as many cases as fit; --cases selects some
}
"""Seconds, by part."""
