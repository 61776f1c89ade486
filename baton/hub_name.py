"""HubName: a model of the Hugging Face Hub as users write it, ORG/NAME[@REVISION][:FILE]; knows no network."""

import re
from dataclasses import dataclass, replace
from typing import Self

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@:\s]+))?(?::(?P<gguf>[^@:\s]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, one of its revisions, and perhaps one of its GGUF files."""

    repo: str
    """ORG/NAME."""
    revision: str | None = None
    """A branch, a tag or a commit; None: the branch `main`."""
    gguf: str | None = None
    """A quantization (`Q4_K_M`), a file's name or a pattern; None: safetensors, or the only GGUF file."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name in `text`; None if `text` cannot be a name. A path such as `models/tiny` can be one."""
        match = None if text.endswith(".gguf") and ":" not in text else _NAME.fullmatch(text)
        return None if match is None else cls(**match.groupdict())

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}{self._file_text}"

    @property
    def served_name(self) -> str:
        """The name by which clients ask for the model: without its revision."""
        return f"{self.repo}{self._file_text}"

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit, which never changes."""
        return self.revision if self.revision is not None and _COMMIT.fullmatch(self.revision) else None

    def at(self, commit: str) -> Self:
        return replace(self, revision=commit)

    @property
    def _file_text(self) -> str:
        return "" if self.gguf is None else f":{self.gguf}"


def leaves_revision_open(asked: str, served: str) -> bool:
    """Whether `asked` is the name `served` without its revision. If so, `asked` means the fleet's commit."""
    name, other = HubName.parse(asked), HubName.parse(served)
    return name is not None and other is not None and name == replace(other, revision=None)


def is_same_repository(text: str | None, other_text: str | None) -> bool:
    """Whether both texts name the same files of the Hub, whatever their revisions."""
    if text is None or other_text is None:
        return False
    name, other = HubName.parse(text), HubName.parse(other_text)
    return name is not None and other is not None and name.served_name == other.served_name


def is_pinned(text: str) -> bool:
    """Whether the text names a commit of the Hub. Then it means the same model on every machine."""
    name = HubName.parse(text)
    return name is not None and name.commit is not None
