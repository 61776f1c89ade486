"""Tokenizer: the tokenizer and chat template of a model folder."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from baton.errors import ConfigError, InvalidRequest, ModelError
from engine.loading.gguf_folder import gguf_of
from gateway.conversation import (
    NUM_PROMPT_END_TOKENS,
    AnswerFormat,
    Conversation,
    Vocabulary,
    answer_format_of,
    has_system_texts,
    results_in_order,
    stricter_forms,
    with_descriptions,
    with_system_first,
)
from gateway.conversation.checks import check_num_values
from gateway.text.plain_tokenizer import PlainTokenizer
from gateway.text.time_limit import TookTooLong
from gateway.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

NO_TOKENIZER_JSON = (
    ". The folder has no tokenizer.json. To read other files, transformers may need the package sentencepiece "
    "or tiktoken"
)
"""The end of a message about a folder that transformers cannot read. For a tokenizer.model of SentencePiece,
transformers itself names only tiktoken."""


class Tokenizer:
    """Encoding and decoding are safe from any thread; TokenizerPool provides threads."""

    def __init__(self, folder: Path, answer_format: str | None = None) -> None:
        """Do not call this on the event loop: it may take seconds, since most folders need transformers.

        `answer_format`: one of FORMAT_NAMES. None: the chat template shows the format. Raises ConfigError if the
        model's chat template cannot be used with the format, or if the model has no chat template.
        """
        self.folder = folder.absolute()
        self._tokenizer: Any = PlainTokenizer.of(self.folder) or _by_transformers(folder)
        self.backend: RustTokenizer = self._tokenizer.backend_tokenizer
        # A tokenizer.json may enable truncation or padding, which training needs.
        self.backend.no_truncation()
        self.backend.no_padding()
        self._token_bytes = TokenBytes(self.backend)
        ids = self.backend.get_vocab()
        self.longest_token = max(map(len, ids), default=1)
        """Number of characters of the longest token."""
        vocabulary = vocabulary_of(self.backend, ids.values())
        template = self._template_source()
        if template is None and answer_format is not None:
            raise ConfigError(
                f"gateway.answer_format: {answer_format!r} needs a chat template, and this model has none; use 'auto'"
            )
        self.answer_format: AnswerFormat | None = (
            None if template is None else answer_format_of(template, vocabulary, answer_format)
        )
        """None: the model has no chat template, so it has no conversations."""
        kept = {} if self.answer_format is None else self.answer_format.kept_special_tokens
        self.kept_tokens = {ids[token]: text for token, text in kept.items() if token in ids}
        """Special tokens that stay in an answer's text, since the answer format needs them."""

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self.answer_format is not None

    def _template_source(self) -> str | None:
        """The chat template; if there are several, the template for tools."""
        template = self._tokenizer.chat_template
        return template.get("tool_use", template.get("default")) if isinstance(template, dict) else template

    def files(self) -> dict[str, bytes]:
        """The tokenizer's files, by path: `tokenizer.json`, its configuration and templates."""
        with TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            files = (file for file in sorted(Path(folder).rglob("*")) if file.is_file())
            return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; a character of several bytes may be spread over several tokens."""
        return self._token_bytes.of(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids; by default with the special tokens that the model expects around a text."""
        # The library releases the interpreter lock only for batches; then other threads can run.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of all tokens together; bytes that form no character become U+FFFD."""
        (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def prompt_end(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt's last tokens, including special tokens, for AnswerFormat."""
        return self.decode(token_ids[-NUM_PROMPT_END_TOKENS:], skip_special_tokens=False)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as written in the vocabulary; empty for an unknown id."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def render_chat(self, conversation: Conversation, add_generation_prompt: bool = True) -> str:
        """The conversation in the format of the model's training, up to the beginning of the answer.

        Some templates refuse what agents send, such as system messages in mid-conversation. Then messages are joined
        until the template accepts them. If a template leaves out such a system message, all system messages come first.

        The template is a program by the model's author; it runs in transformers' sandbox. If the template accepts no
        form, an InvalidRequest that names `chat` has the reason for which it refused the conversation itself. The
        calling code must limit the template's time by run_within. TookTooLong passes through only if the template has
        neither accepted nor refused the conversation until then.
        """
        if self.answer_format is None:
            raise InvalidRequest(
                "chat", "this model's tokenizer has no chat template; send text or token ids"
            )
        check_num_values(conversation.messages)
        conversation = results_in_order(conversation)
        render = partial(self._rendered, self.answer_format, add_generation_prompt=add_generation_prompt)
        text = _accepted(render, conversation)
        if has_system_texts(conversation, text):
            return text
        with suppress(InvalidRequest, TookTooLong):
            moved = _accepted(render, with_system_first(conversation))
            if has_system_texts(conversation, moved):
                return moved
        return text

    def _rendered(
        self, answer_format: AnswerFormat, conversation: Conversation, add_generation_prompt: bool
    ) -> str:
        arguments = answer_format.template_arguments(conversation)
        try:
            text = self._tokenizer.apply_chat_template(
                **arguments, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # it may raise anything
            raise InvalidRequest(
                "chat", f"the model's chat template refused the conversation: {error}"
            ) from error
        return _in_whole_characters(str(text))


def _accepted(render: Callable[[Conversation], str], conversation: Conversation) -> str:
    """The conversation as text, or its first stricter form that the template accepts. If there is none, or if the time
    limit ends the search, raises the first refusal.

    Some templates refuse tools without descriptions. So for each reason of a refusal, tries once whether
    descriptions change this reason. If they do, all further forms have descriptions. Otherwise, tries them
    once more with the last form.
    """
    refusals: list[InvalidRequest] = []

    def text_of(form: Conversation) -> str | None:
        try:
            return render(form)
        except InvalidRequest as refusal:
            refusals.append(refusal)
            return None

    def candidates() -> Iterator[Conversation]:
        reasons, are_described = set[str](), False
        form = described = conversation
        for form in chain([conversation], stricter_forms(conversation)):
            described = with_descriptions(form)
            yield described if are_described else form
            reason = str(refusals[-1])
            if described is not form and not are_described and reason not in reasons:
                yield described
                are_described = str(refusals[-1]) != reason
                reasons.add(reason)
        if described is not form and not are_described:
            yield described

    try:
        for form in candidates():
            if (text := text_of(form)) is not None:
                return text
        raise refusals[0]
    except TookTooLong:
        if not refusals:
            raise
        raise refusals[0] from None
    finally:
        refusals.clear()  # so that no circle of references keeps the conversation


def _in_whole_characters(text: str) -> str:
    """The text, with U+FFFD in place of each half of a pair of surrogates, which no tokenizer accepts. JSON can express
    such a half, so the arguments of an earlier call may have it."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def vocabulary_of(backend: "RustTokenizer", ids: Iterable[int]) -> Vocabulary:
    """Keeps no dictionary of the ids, which would take 100 bytes for each token."""
    added = backend.get_added_tokens_decoder()
    special_ids = {token_id for token_id, token in added.items() if token.special}
    return Vocabulary(backend.token_to_id, array("I", sorted(set(ids) - special_ids)))


def _by_transformers(folder: Path) -> Any:
    # not at the top of the file: this import takes seconds
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if gguf_of(folder) is not None and (folder / "tokenizer.json").is_file():
            # For a model of type qwen2, AutoTokenizer would apply Qwen2's rules instead of those of tokenizer.json.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    # Damaged or newer files make the libraries raise anything, also Rust's panics.
    except BaseException as error:
        problem = (
            str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        )
        hint = "" if (folder / "tokenizer.json").is_file() else NO_TOKENIZER_JSON
        raise ModelError(f"{folder} has no usable tokenizer: {problem}{hint}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{folder} has no usable tokenizer: {type(tokenizer).__name__} is written in Python, and Baton supports "
            "only tokenizers of the tokenizers library, which tokenizer.json describes"
        )
    return tokenizer
