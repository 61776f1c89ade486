"""PlainTokenizer: a tokenizer that tokenizer.json describes completely; needs no class of transformers.

transformers creates the same tokenizer from such a folder, but takes seconds to import its classes. This module
imports only its function that renders chat templates, if the folder has a template. All other folders need
transformers itself: folders whose own class rebuilds the tokenizer, folders with tokens that tokenizer.json lacks, and
folders with older files.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Tokenizer as RustTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
"""If a folder has one of these files, transformers changes what tokenizer.json describes."""
CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that use the tokenizer of tokenizer.json unchanged, for the models of MODEL_TYPES."""
MODEL_TYPES = ("llama", "qwen3")
"""Model types in config.json. For other types, transformers may choose another class."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
WITHOUT_EFFECT = ("tokenizer_class", "clean_up_tokenization_spaces", "model_max_length")


class PlainTokenizer:
    """Behaves like the result of `transformers.AutoTokenizer`, as far as `Tokenizer` uses it."""

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """The folder's tokenizer; None if the folder needs transformers, or is invalid: transformers then
        reports why.
        """
        try:
            content = (folder / "tokenizer.json").read_text(encoding="utf-8")
            added = json.loads(content)["added_tokens"]
            config = json.loads((folder / "tokenizer_config.json").read_bytes())
            model_type = json.loads((folder / "config.json").read_bytes())["model_type"]
            special = {key: config.pop(key) for key in SPECIAL_TOKENS if key in config}
            is_plain = (
                config.get("tokenizer_class") in CLASSES
                and config.keys() <= set(WITHOUT_EFFECT)
                and model_type in MODEL_TYPES
                and set(special.values()) <= {token["content"] for token in added if token["special"]}
                and not any((folder / name).exists() for name in OTHER_FILES)
            )
            return cls(folder, RustTokenizer.from_str(content), special) if is_plain else None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the library raises bare Exceptions, and panics, which are no Exceptions
            return None

    def __init__(self, folder: Path, backend: RustTokenizer, special_tokens: dict[str, str]) -> None:
        self._folder = folder
        self.backend_tokenizer = backend
        self._special_tokens = special_tokens
        template = folder / "chat_template.jinja"
        self.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
        self._render: Callable[..., Any] | None = None
        if self.chat_template is not None:
            from transformers.utils.chat_template_utils import render_jinja_template

            self._render = render_jinja_template

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """`variables`: other variables that the template may read."""
        assert self._render is not None, "there is no chat template"
        assert not tokenize, "the caller does so"
        if not conversation:
            raise ValueError("a conversation needs a message")
        (text,), _ = self._render(
            [conversation],
            tools=tools,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
            **variables,
        )
        return str(text)

    def save_pretrained(self, target: str) -> None:
        for name in FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, Path(target) / name)
