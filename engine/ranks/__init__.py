"""The tensor-parallel ranks of one worker: what each consists of, their processes, and how they end together."""
