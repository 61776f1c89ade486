"""Harmony's special tokens, and its names for channels and functions."""

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HEADS = (START, CHANNEL)
"""Each begins a message's head."""
ENDS = (END, CALL, RETURN)
"""Each ends a message."""
TOKENS = (*HEADS, *ENDS, MESSAGE, CONSTRAIN)

ASSISTANT = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
RECIPIENT = "to="
FUNCTIONS = "functions."
