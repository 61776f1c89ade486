"""Further chat templates of a model, such as the one for tools, come with its Hub name like its other small files."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from engine.loading.pretrained import resolve
from gateway.text import Tokenizer
from tests.factories.stub_hub import Repository, stub_hub, use_in_this_process

NAME = "acme/tiny"
TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize("weights", [False, True])
def test_further_chat_templates_come_too(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with stub_hub() as hub:
        use_in_this_process(hub, tmp_path / "hf", monkeypatch)
        hub.repositories[NAME] = Repository()
        hub.repositories[NAME].commit(
            files | {TEMPLATE: b"{{ tools }}", "other/x.jinja": b"", "other/config.json": b"{}"}
        )

        path = resolve(NAME, tmp_path, weights=weights)
        num_requests = len(hub.requests)
        assert resolve(f"{NAME}@{path.name}", tmp_path, weights=weights) == path

        assert len(hub.requests) == num_requests, "nothing is missing any more"
    assert (path / TEMPLATE).read_text() == "{{ tools }}"
    assert (path / "model.safetensors").exists() == weights
    assert not (path / "other").exists()
    assert Tokenizer(path).has_chat_template


def test_a_cache_without_further_chat_templates_serves_the_model_offline(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program may have filled the cache."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with stub_hub() as hub:
        use_in_this_process(hub, tmp_path / "hf", monkeypatch)
        hub.repositories[NAME] = Repository()
        hub.repositories[NAME].commit(files | {TEMPLATE: b"{{ tools }}"})
        path = resolve(NAME, tmp_path)
        (path / TEMPLATE).unlink()
        num_requests = len(hub.requests)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

        assert resolve(NAME, tmp_path) == path
        assert len(hub.requests) == num_requests

        assert f"{NAME} is served without {TEMPLATE}: HF_HUB_OFFLINE forbids downloads" in caplog.text
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert resolve(NAME, tmp_path) == path
    assert (path / TEMPLATE).exists()
