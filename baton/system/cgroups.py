"""The cgroups around this process, such as that of its container; does not read their limits."""

from collections.abc import Iterator
from pathlib import Path


def cgroups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the cgroups with this controller, the innermost first; some may not exist."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers  # version 2 names no controllers
        own = base / path.lstrip("/")
        yield from (folder for folder in [own, *own.parents] if folder.is_relative_to(base))
