"""Names of models on the Hub: which texts are such names, and when two names mean the same model."""

import pytest

from baton.hub_name import HubName, is_pinned, leaves_revision_open

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen/Qwen3-0.6B", "v1.0")),
        (f"a/b@{COMMIT}", HubName("a/b", COMMIT)),
        ("a/b@refs/pr/4", HubName("a/b", "refs/pr/4")),
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", HubName("unsloth/Qwen3-0.6B-GGUF", None, "Q4_K_M")),
        ("a/b@main:*q4*.gguf", HubName("a/b", "main", "*q4*.gguf")),
        ("a/b:folder/m.gguf", HubName("a/b", None, "folder/m.gguf")),
    ],
)
def test_a_name_is_read_and_written(text: str, name: HubName) -> None:
    assert HubName.parse(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "smollm2",
        "./a/b",
        "/a/b",
        "a/b/c",
        "a//b",
        "a/",
        "../a",
        "~/a",
        "a/b@",
        "a/b:",
        "a/b@x:y:z",
        "a/b@x@y",
        "a/m.gguf",
        "a /b",
        "s3://bucket/folder",
    ],
)
def test_other_texts_are_no_names(text: str) -> None:
    assert HubName.parse(text) is None


def test_clients_ask_for_the_model_without_its_revision() -> None:
    name = HubName("a/b", "v1", "Q8_0")
    assert name.served_name == "a/b:Q8_0"
    assert name.at(COMMIT) == HubName("a/b", COMMIT, "Q8_0")
    assert (name.commit, name.at(COMMIT).commit) == (None, COMMIT)


@pytest.mark.parametrize(
    ("asked", "served", "is_open"),
    [
        ("a/b", f"a/b@{COMMIT}", True),
        ("a/b:Q8_0", f"a/b@{COMMIT}:Q8_0", True),
        ("a/b", f"a/b@{COMMIT}:Q8_0", False),
        ("a/b@main", f"a/b@{COMMIT}", False),
        ("a/c", f"a/b@{COMMIT}", False),
        ("smollm2", "smollm2", False),
        ("a/b", "/models/b", False),
    ],
)
def test_a_name_without_revision_leaves_the_commit_to_the_fleet(
    asked: str, served: str, is_open: bool
) -> None:
    assert leaves_revision_open(asked, served) is is_open


def test_only_a_commit_pins_a_name() -> None:
    assert is_pinned(f"a/b@{COMMIT}:Q8_0")
    assert not any(map(is_pinned, ("a/b", "a/b@main", "smollm2", f"/cache/snapshots/{COMMIT}")))
