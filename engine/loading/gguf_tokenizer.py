"""Makes tokenizer.json from a GGUF file's vocabulary: byte-level BPE (`gpt2`) or SentencePiece (`llama`).

The result has the format of the `tokenizers` library, so every reader of a Hugging Face folder can read it. A
GGUF file does not describe how text is cut into words before merging. It only has a name for the rule
(`tokenizer.ggml.pre`). The names are those of llama.cpp:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp. A name without an entry here is
refused, since a wrong rule silently gives wrong tokens.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from baton.errors import ModelError
from engine.loading.gguf import GgufFile

Json = dict[str, Any]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTION
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_ENDS_OF_TEXTS = {"<|endoftext|>", "<|end_of_text|>", "</s>", "[EOS]"}
_ENDS_OF_TURNS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<|observation|>",
}
_ENDS_OF_HARMONY = frozenset({"<|return|>", "<|call|>"})
"""In the harmony format (gpt-oss), these tokens end a turn, and `<|end|>` only a message of the turn."""
_ENDS = frozenset({*_ENDS_OF_TEXTS, *_ENDS_OF_TURNS, "<|eom_id|>", *_ENDS_OF_HARMONY})
"""Tokens that end a text, a turn or a message in chat templates. Except for `<|observation|>`, llama.cpp ends an
answer at each of these tokens, even if the file's keys do not name them. GLM-4 ends a call with `<|observation|>`,
but only its generation_config.json says so."""
_NEVER_STRIPPED = ("<s>", "<unk>", "<|endoftext|>")
"""Tokens after which spaces are kept even for Phi-3."""
_MAX_TOKEN_CHARS = 4096
_MAX_CUT_CHARS = 2**28
"""All pairs into which SentencePiece's tokens can be cut have at most this many characters together. 262,144 tokens of
16 characters have a quarter of this number."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


_ORDINARY = (TokenType.NORMAL, TokenType.BYTE)
_SPECIAL_FORM = re.compile(r"<.+>|\[[A-Z_]+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut into words, before tokens are merged within each word."""

    patterns: tuple[str, ...]
    """Patterns that are applied one after another. Each match becomes a piece, and so does the text between
    matches."""
    prefers_whole_words: bool = False
    """Whether a word that is in the vocabulary is always one token, whatever the merges are."""
    is_nfc: bool = False
    """Whether text is first converted to Unicode's form NFC, as in the model's own tokenizer."""


_CUTS = {
    **dict.fromkeys(("gpt-2", "olmo"), _Cut((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Cut((_DIGIT, _GPT2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"),
        _Cut((_LLAMA3,), prefers_whole_words=True),
    ),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), _Cut((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Cut((_QWEN2,), is_nfc=True)),
    "tekken": _Cut((_TEKKEN,), prefers_whole_words=True),
    "gpt-4o": _Cut((_GPT_4O,), prefers_whole_words=True),
    "minimax-m2": _Cut((_GPT_4O,)),
}
"""The rule for each value of `tokenizer.ggml.pre`."""
_BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Values of `tokenizer.ggml.pre` for which texts begin with BOS if the file has no `tokenizer.ggml.add_bos_token`."""


def tokenizer_json(file: GgufFile) -> Json:
    """The content of tokenizer.json; ModelError names an unsupported kind of tokenizer."""
    tokens = file.strings("tokenizer.ggml.tokens")
    kind = file.need("tokenizer.ggml.model", str)
    is_phi3 = kind == "llama" and file.get("general.architecture", str) == "phi3"
    if kind == "gpt2":
        parts, has_bos = _byte_level(file, tokens)
    elif kind == "llama":
        parts, has_bos = _sentence_piece(file, tokens)
    else:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece)"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(file, tokens, are_stripped=is_phi3),
        "post_processor": _template(file, tokens, has_bos=has_bos),
        **parts,
    }


def special_tokens(file: GgufFile) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of tokenizer_config.json.

    `eos_token` is left out if the file's token must not end answers, since an answer ends at `eos_token`. Any other of
    these tokens is left out if it is ordinary text, since answers are shown without special tokens. A file's key may
    name ordinary text if the model's config.json names id 0 or 1, although the vocabulary begins with punctuation. A
    token like `<s>` is special even if its type is that of ordinary text, as in files of older converters.
    """
    tokens = file.strings("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {short: _token_id(file, tokens, long) for short, long in names.items()}
    if ids["eos"] not in _ends(file, tokens):
        del ids["eos"]
    types = file.numbers("tokenizer.ggml.token_type")
    return {
        f"{short}_token": tokens[token_id]
        for short, token_id in ids.items()
        if token_id is not None
        and (short == "eos" or not types or not _is_text(tokens[token_id], types[token_id]))
    }


def _is_text(token: str, token_type: float) -> bool:
    return token_type in _ORDINARY and _SPECIAL_FORM.fullmatch(token) is None


def special_token_ids(file: GgufFile) -> dict[str, int | list[int]]:
    """`bos_token_id` and `eos_token_id` of config.json. `eos_token_id` names every token that ends a text, turn or
    message."""
    tokens = file.strings("tokenizer.ggml.tokens")
    ends, bos = _ends(file, tokens), _token_id(file, tokens, "bos")
    ids: dict[str, int | list[int]] = {} if bos is None else {"bos_token_id": bos}
    return ids | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def _ends(file: GgufFile, tokens: list[str]) -> list[int]:
    by_key = (_token_id(file, tokens, name) for name in ("eos", "eot", "eom"))
    by_name = (token_id for token_id, token in enumerate(tokens) if token in _ENDS)
    ends = list(dict.fromkeys([*(token_id for token_id in by_key if token_id is not None), *by_name]))
    if _ENDS_OF_HARMONY.issubset(tokens):  # as in llama.cpp, even if a key names the end of a message
        ends = [token_id for token_id in ends if tokens[token_id] != "<|end|>"]
    return ends


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Json, bool]:
    name = file.need("tokenizer.ggml.pre", str)
    cut = _CUTS.get(name)
    if cut is None:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre is {name!r}, which is not supported; supported are {', '.join(_CUTS)}"
        )
    split: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cut.patterns
    ]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    known = set(tokens)
    merges = [_pair(file, merge, known) for merge in file.strings("tokenizer.ggml.merges")]
    return {
        "normalizer": {"type": "NFC"} if cut.is_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, as_bytes]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=cut.prefers_whole_words),
    }, name in _BEGINS_WITH_BOS


def _sentence_piece(file: GgufFile, tokens: list[str]) -> tuple[Json, bool]:
    """SentencePiece writes spaces as U+2581, and bytes without their own token as <0x00> to <0xFF>."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens, but {len(scores)} tokenizer.ggml.scores")
    if (longest := max(map(len, tokens))) > _MAX_TOKEN_CHARS:
        raise ModelError(
            f"{file.path}: a token has {longest:,} characters; at most {_MAX_TOKEN_CHARS:,} are supported"
        )
    if sum(len(token) ** 2 for token in tokens) > _MAX_CUT_CHARS:
        raise ModelError(f"{file.path}: the tokens of tokenizer.ggml.tokens are too long")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    begins_with_space = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    prefix: list[Json] = [{"type": "Prepend", "prepend": "▁"}] if begins_with_space else []
    strip: list[Json] = (
        [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []
    )
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    unknown = _token_id(file, tokens, "unknown")
    model = _bpe(tokens, _merges_by_score(tokens, scores), byte_fallback=True)
    model |= {"unk_token": None if unknown is None else tokens[unknown], "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model,
    }, True


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Every pair that makes a token, the highest score first, since SentencePiece merges in this order.

    Among pairs of equal score, the longer first part comes first, as in transformers' conversion.
    """
    known = set(tokens)
    merges = [
        (score, len(left), len(right), left, right)
        for token, score in zip(tokens, scores, strict=True)
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in known and right in known
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]


def _bpe(
    tokens: list[str], merges: list[list[str]], *, byte_fallback: bool = False, ignore_merges: bool = False
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": merges,
    }


def _pair(file: GgufFile, merge: str, tokens: set[str]) -> list[str]:
    pair = merge.split(" ")
    if len(pair) != 2 or not tokens.issuperset([*pair, "".join(pair)]):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.merges has {merge!r}, which does not join two tokens into a token"
        )
    return pair


def _added_tokens(file: GgufFile, tokens: list[str], *, are_stripped: bool) -> list[Json]:
    """Tokens that are found in a text before any other rule; a decoder may skip the special ones.

    `are_stripped`: spaces and newlines after most of these tokens are no part of the text. No key says so; llama.cpp
    has it in its code, too.
    """
    types = file.numbers("tokenizer.ggml.token_type")
    if types and len(types) != len(tokens):
        raise ModelError(
            f"{file.path} has {len(tokens)} tokens, but {len(types)} entries in tokenizer.ggml.token_type"
        )
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": are_stripped and tokens[token_id] not in _NEVER_STRIPPED,
            "normalized": False,
            "special": number == TokenType.CONTROL,
        }
        for token_id, number in enumerate(types)
        if number in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _template(file: GgufFile, tokens: list[str], *, has_bos: bool) -> Json:
    """The template that adds special tokens before and after a text."""
    given = file.get("tokenizer.ggml.add_bos_token", bool)
    bos = _token_id(file, tokens, "bos") if (has_bos if given is None else given) else None
    eos = _token_id(file, tokens, "eos") if file.get("tokenizer.ggml.add_eos_token", bool) else None

    def special(token_id: int | None, sequence: int) -> list[Json]:
        return [] if token_id is None else [{"SpecialToken": {"id": tokens[token_id], "type_id": sequence}}]

    def around(name: str, sequence: int) -> list[Json]:
        text = {"Sequence": {"id": name, "type_id": sequence}}
        return [*special(bos, sequence), text, *special(eos, sequence)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            tokens[token_id]: {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
            for token_id in (bos, eos)
            if token_id is not None
        },
    }


def _token_id(file: GgufFile, tokens: list[str], name: str) -> int | None:
    """The id of a special token; ModelError if there is no such token."""
    token_id = file.get(f"tokenizer.ggml.{name}_token_id", int)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise ModelError(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {token_id}, but there are {len(tokens)} tokens"
        )
    return token_id
