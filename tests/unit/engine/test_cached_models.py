"""What `baton models` says of each model in the caches."""

import io
import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console

from baton.config import BatonConfig
from cli.commands.models import show
from engine.loading.cached_models import CachedModel, cached_models
from tests.factories.gguf_files import make_gguf
from tests.factories.models import make_model_dir

COMMITS = ["a" * 40, "b" * 40]
CONFIG = BatonConfig.from_mapping({"model": {"dtype": "float32"}, "engine": {"kv_cache_memory_mib": 1}})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add(
    home: Path, repo: str, source: Path, commit: str = COMMITS[0], refs: tuple[str, ...] = ("main",)
) -> Path:
    """The files of `source` as a snapshot, as huggingface_hub lays them out."""
    place = home / f"models--{repo.replace('/', '--')}"
    for ref in refs:
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / ref).write_text(commit)
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir(exist_ok=True)
    for file in source.iterdir():
        blob = place / "blobs" / f"{commit[:4]}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def listed(tmp_path: Path, config: BatonConfig = CONFIG) -> dict[str, CachedModel]:
    return {model.name: model for model in cached_models(config, tmp_path / "baton")}


def test_an_empty_cache_lists_nothing_and_says_what_to_do(home: Path, tmp_path: Path) -> None:
    assert listed(tmp_path) == {}
    out = io.StringIO()
    show([], Console(file=out))
    assert "`baton serve --model ORG/NAME` downloads one" in out.getvalue()


def test_what_would_load_and_what_it_would_take(home: Path, tmp_path: Path, folder: Path) -> None:
    snapshot = add(home, "acme/tiny", folder)
    add(home, "acme/tiny", make_model_dir(tmp_path / "older", dtype="bfloat16"), COMMITS[1], ())
    found = listed(tmp_path)
    assert found.keys() == {"acme/tiny", f"acme/tiny@{COMMITS[1]}"}
    model = found["acme/tiny"]
    assert (model.problem, model.path, model.commit, model.refs) == ("", snapshot, COMMITS[0], ("main",))
    assert (model.architecture, model.stored_as, str(model.dtype)) == (
        "LlamaForCausalLM",
        "float32",
        "float32",
    )
    assert model.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert model.footprint is not None
    assert model.footprint.kv_bytes_per_token == 768
    assert found[f"acme/tiny@{COMMITS[1]}"].stored_as == "bfloat16"


def test_a_gguf_file_is_a_model_of_its_own(home: Path, tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_gguf(source / "tiny-Q8_0.gguf", folder, "Q8_0")
    (source / "broken.gguf").write_bytes(b"GGUF")
    add(home, "acme/tiny", source)
    found = listed(tmp_path)
    assert found.keys() == {"acme/tiny:tiny-Q8_0.gguf", "acme/tiny:broken.gguf"}
    assert found["acme/tiny:tiny-Q8_0.gguf"].stored_as == "Q8_0"
    assert found["acme/tiny:tiny-Q8_0.gguf"].problem == ""
    assert "broken.gguf" in found["acme/tiny:broken.gguf"].problem


def test_copies_from_object_stores_are_listed_by_their_paths(
    home: Path, tmp_path: Path, folder: Path
) -> None:
    copies = tmp_path / "baton" / "buckets"
    whole, part, gguf = (
        copies / ("a" * 16) / "tiny",
        copies / ("b" * 16) / "tiny",
        copies / ("c" * 16) / "t.gguf",
    )
    shutil.copytree(folder, whole)
    shutil.copytree(folder, part, ignore=shutil.ignore_patterns("*.safetensors"))
    gguf.mkdir(parents=True)
    make_gguf(gguf / "t.gguf", folder, "Q8_0")
    (whole.parent / ".lock").touch()
    found = listed(tmp_path)
    assert list(found) == [str(whole), str(part), str(gguf / "t.gguf")]
    assert found[str(whole)].problem == ""
    assert found[str(whole)].size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert found[str(part)].problem == (
        "not all of its weights are here; `baton serve` with its URL downloads the rest"
    )
    assert (found[str(gguf / "t.gguf")].stored_as, found[str(gguf / "t.gguf")].problem) == ("Q8_0", "")


def test_a_model_whose_files_are_gone_is_listed(home: Path, tmp_path: Path, folder: Path) -> None:
    """The Hub's library leaves it out."""
    snapshot = add(home, "acme/tiny", folder)
    add(home, "acme/other", folder)
    (snapshot / "tokenizer.json").resolve().unlink()
    found = listed(tmp_path)
    assert list(found) == ["acme/other", "acme/tiny"]
    assert found["acme/other"].problem == ""
    assert "tokenizer.json: files are missing; `baton serve --model acme/tiny`" in found["acme/tiny"].problem


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantization_config.quant_method 'quip'"),
        ({"architectures": {"a": 1}}, "architectures must be a list of names, got {'a': 1}"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number, got 'x'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token, a list of tokens, or null, got '</s>'"),
        (None, "not all of its weights are here; `baton serve --model acme/tiny` downloads the rest"),
    ],
)
def test_what_would_not_load_says_why(
    home: Path, tmp_path: Path, damage: dict[str, object] | None, problem: str
) -> None:
    source = make_model_dir(tmp_path / "source")
    if damage is None:
        (source / "model.safetensors").unlink()
    else:
        (source / "generation_config.json").unlink()
        values = json.loads((source / "config.json").read_text()) | damage
        (source / "config.json").write_text(json.dumps(values))
    add(home, "acme/tiny", source)
    model = listed(tmp_path)["acme/tiny"]
    assert problem in model.problem
    out = io.StringIO()
    show([model], Console(file=out, width=160))
    row, *rest = out.getvalue().splitlines()[1:]
    assert row.split()[-1] == "no"
    assert rest[0].startswith("acme/tiny: ")
    assert problem in rest[0]


@pytest.mark.parametrize(
    ("file", "kept", "problem"),
    [
        (
            "model.safetensors",
            4000,
            "is not a readable safetensors file: the file has 4,000 bytes, but its header",
        ),
        ("tokenizer.json", None, "has no tokenizer; a model folder needs tokenizer.json"),
    ],
)
def test_a_broken_folder_does_not_load(
    home: Path, tmp_path: Path, file: str, kept: int | None, problem: str
) -> None:
    """`kept`: how many bytes of the file are there; None: the file is missing."""
    source = make_model_dir(tmp_path / "source", num_hidden_layers=1)
    content = (source / file).read_bytes()
    (source / file).unlink()
    if kept is not None:
        (source / file).write_bytes(content[:kept])
    add(home, "acme/tiny", source)
    assert problem in listed(tmp_path)["acme/tiny"].problem


def test_what_the_configuration_cannot_have_of_a_model_is_its_problem(
    home: Path, tmp_path: Path, folder: Path
) -> None:
    add(home, "acme/tiny", folder)
    config = BatonConfig.from_mapping({"model": {"dtype": "float32"}, "engine": {"tensor_parallel": 3}})
    assert (
        "got 3, which does not divide this model's 4 attention heads"
        in listed(tmp_path, config)["acme/tiny"].problem
    )


def test_a_model_without_room_does_not_load_here(home: Path, tmp_path: Path, folder: Path) -> None:
    add(home, "acme/tiny", folder)
    config = BatonConfig.from_mapping({"engine": {"kv_cache_memory_mib": 2**40}})
    assert listed(tmp_path, config)["acme/tiny"].problem.startswith("acme/tiny does not fit: a worker needs")


def test_datasets_and_repositories_without_config_are_told_apart(
    home: Path, tmp_path: Path, folder: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "README.md").write_text("#")
    add(home, "acme/words", source)
    add(home, "acme/data", folder)
    (home / "models--acme--data").rename(home / "datasets--acme--data")
    found = listed(tmp_path)
    assert found.keys() == {"acme/words"}
    assert "has no config.json" in found["acme/words"].problem
