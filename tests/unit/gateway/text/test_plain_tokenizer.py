"""Tokenizers without transformers: which folders do not need it, and that it gives the same results for them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from engine.loading.gguf_folder import describe
from gateway.conversation import ChatMessage, Conversation
from gateway.text import Tokenizer
from gateway.text.plain_tokenizer import PlainTokenizer
from tests.factories.gguf_files import make_gguf
from tests.factories.models import make_model_dir

TEXTS = [
    "",
    "the cache  is a baton\n",
    " 123 4567",
    "日本 😀 <|im_end|>x<|endoftext|>",
    "a" * 50,
    "don't\r\n\t THE",
]
MESSAGES = [
    {"role": "system", "content": "Be short.  "},
    {"role": "user", "content": "Why {{ is }} <|im_end|> the sky blue?"},
]
TEMPLATES = {
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ cls_token }}",
    "loops and controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "  {{- m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}go{% endif %}",
    "the assistant's part": "{% generation %}{{ messages[1].content }}{% endgeneration %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "a namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
    "tools": "{{ tools is none }} {{ documents is none }} {{ nothing is defined }}",
    "white space": "  {% if true %}  \n x \n  {% endif %}  \n\n",
}


def gguf_folder(tmp_path: Path, architecture: str = "llama", **metadata: Any) -> Path:
    source = make_model_dir(tmp_path / "source", architecture, num_hidden_layers=1)
    describe(make_gguf(tmp_path / "m.gguf", source, **metadata), tmp_path / "folder")
    return tmp_path / "folder"


def check_same(folder: Path) -> None:
    plain, theirs = PlainTokenizer.of(folder), AutoTokenizer.from_pretrained(folder)
    assert plain is not None
    ours = Tokenizer(folder)
    found, expected = (json.loads(t.backend_tokenizer.to_str()) for t in (plain, theirs))
    if found["post_processor"] is None:  # transformers then has a post-processor without effect
        expected["post_processor"] = None
    assert found == expected
    for text in TEXTS:
        for add_special_tokens in (False, True):
            ids = theirs(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert list(ours.encode(text, add_special_tokens)) == ids
            for skip in (False, True):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert ours.has_chat_template == (theirs.chat_template is not None)
    for add_generation_prompt in (False, True) if ours.has_chat_template else ():
        expected_text = theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        conversation = Conversation(
            tuple(ChatMessage(message["role"], message["content"]) for message in MESSAGES)
        )
        assert ours.render_chat(conversation, add_generation_prompt) == expected_text


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_transformers_makes_the_same_of_a_gguf_files_folder(
    tmp_path: Path, architecture: str, pre: str
) -> None:
    check_same(gguf_folder(tmp_path, architecture, tokenizer__ggml__pre=pre))


def test_a_checkpoints_folder_may_be_plain_too(tmp_path: Path) -> None:
    check_same(make_model_dir(tmp_path, num_hidden_layers=1))


def test_beginnings_and_ends_are_added_as_tokenizer_json_says(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}
    folder = gguf_folder(tmp_path, **keys)
    check_same(folder)
    assert Tokenizer(folder).encode("x")[0] == 1
    assert Tokenizer(folder).encode("x")[-1] == 2


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()], ids=[None, *TEMPLATES])
def test_chats_are_rendered_as_by_transformers(tmp_path: Path, template: str | None) -> None:
    check_same(gguf_folder(tmp_path, tokenizer__chat_template=template))


def with_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_another_token(folder: Path) -> None:
    with_config(folder, unk_token="<never seen>")


def with_a_token_that_is_not_special(folder: Path) -> None:
    tokenizer = Tokenizer(folder).backend
    tokenizer.add_tokens([AddedToken("<plain>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    with_config(folder, unk_token="<plain>")


OTHERS: dict[str, Callable[[Path], object]] = {
    "another class": lambda folder: with_config(folder, tokenizer_class="LlamaTokenizerFast"),
    "another model": lambda folder: (folder / "config.json").write_text('{"model_type": "qwen2"}'),
    "an unknown key": lambda folder: with_config(folder, add_prefix_space=True),
    "a token that tokenizer.json lacks": with_another_token,
    "a token that is not special": with_a_token_that_is_not_special,
    "a token with properties": lambda folder: with_config(folder, eos_token={"content": "<|im_end|>"}),
    "a template among the keys": lambda folder: with_config(folder, chat_template="x"),
    "a map of tokens": lambda folder: (folder / "special_tokens_map.json").write_text("{}"),
    "no configuration": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "damage": lambda folder: (folder / "tokenizer.json").write_text("{}"),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_folders_need_transformers(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = gguf_folder(tmp_path)
    assert PlainTokenizer.of(folder) is not None
    change(folder)
    assert PlainTokenizer.of(folder) is None


def test_its_files_are_the_folders_own(tmp_path: Path) -> None:
    folder = gguf_folder(tmp_path)
    names = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
    assert Tokenizer(folder).files() == {name: (folder / name).read_bytes() for name in names}


@pytest.mark.slow
def test_no_class_of_transformers_is_imported_for_it(tmp_path: Path) -> None:
    """Their import would take most of the time until a tokenizer is loaded."""
    code = (
        "import sys; from pathlib import Path; from gateway.text import Tokenizer\n"
        "from gateway.conversation import ChatMessage, Conversation\n"
        f"Tokenizer(Path({str(gguf_folder(tmp_path))!r})).render_chat(Conversation((ChatMessage('user', 'x'),)))\n"
        "print(sorted({'torch', 'transformers.models', 'transformers.tokenization_utils_base'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
