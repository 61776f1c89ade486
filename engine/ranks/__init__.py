"""The tensor-parallel ranks of one worker: their processes, their messages, and how they end together."""
