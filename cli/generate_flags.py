"""The flags of `baton generate`, apart from those of its target."""

import argparse
from pathlib import Path

from baton.sampling import MAX_SEED


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--max-tokens", type=_count, default=256, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--max-model-len",
        type=_count,
        metavar="N",
        help="end at N tokens of prompt and answer together; default: the model's limit",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0, which is greedy"
    )
    parser.add_argument("--seed", type=_seed, metavar="S", help="same seed, same answer")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without a chat template")
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate --max-tokens tokens, past any end-of-sequence token",
    )
    parser.add_argument(
        "--skip-reading-prefix-cache",
        action="store_true",
        help="compute the whole prompt, even if a prefix cache has a part of it",
    )
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="SCHEMA", help="constrain the answer to a JSON schema")
    grammar.add_argument("--regex", metavar="REGEX", help="constrain the answer to a regular expression")
    parser.add_argument(
        "--tools", type=Path, metavar="FILE", help="JSON file of OpenAI's tools, which the answer may call"
    )
    parser.add_argument(
        "--tool-choice", metavar="CHOICE", help="none, auto (default), required, or the name of a tool"
    )
    parser.add_argument(
        "--mode", choices=("disaggregated", "local"), help="require this way of serving the prompt"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")


def _count(text: str) -> int:
    """Parses a number that fits a field of the gateway's messages. On errors, argparse adds the flag."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"got {text!r}; must be a number from 1 to {2**32 - 1}")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= MAX_SEED):
        raise argparse.ArgumentTypeError(f"got {text!r}; must be a number from 0 to {MAX_SEED}")
    return int(text)
