"""How long each part of the check may take: each fits a command of ten minutes, its start and another's left over."""

PART_LIMITS_S = {
    "smoke": 60.0,  # its launches are compiled in eight processes; a broken device may hang
    "kernels": 540.0,  # `few` takes a minute or two, all of `many` may want more: what was done by then counts
    "attention": 180.0,  # three runs of 25 tests, of which the first compiles
    "marked": 180.0,  # some 30 tests, most of which start processes that load PyTorch
    "tokens": 300.0,  # three models, five ways each; reference tokens by torch on the host
    "handover": 300.0,  # two clusters of processes, 36 answers each, then blocks between two processes
    "decode": 420.0,  # a model, recorded for four batches, at two contexts; then its switches: three minutes each
    "overlap": 180.0,  # one model, one batch; the trace is written once
    "prefill": 300.0,  # two models, eight sizes of some eight rounds
    "peer": 420.0,  # torch.compile alone takes one to three minutes
    "sweep": 540.0,  # as many cases as fit; --cases chooses
}
"""Seconds."""
