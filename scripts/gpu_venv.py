"""Makes a virtual environment with only the packages that a GPU machine has or gets by scripts/gpu_wheels.sh.

    PYTHON scripts/gpu_venv.py FOLDER

Nothing is downloaded: packages are links to those of PYTHON's own environment, so they have this project's versions.
The environment has only packages that requirements/gpu-machine.txt, gpu-wheels.txt or gpu-ray.txt names. Baton itself
is not one of them.
"""

import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("gpu-machine.txt", "gpu-wheels.txt", "gpu-ray.txt")


def main() -> None:
    folder = Path(sys.argv[1])
    venv.create(folder, clear=True, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in listed_names():
        link(distribution(name), site)


def listed_names() -> list[str]:
    lines = [line for file in LISTS for line in (ROOT / "requirements" / file).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def link(package: Distribution, site: Path) -> None:
    """Links the package's modules and extensions, and its metadata, which some packages read at run time."""
    files = [Path(file) for file in package.files or ()]
    assert files, f"{package.name} has no list of its files"
    for entry in sorted({_entry(file, files) for file in files if ".." not in file.parts}):
        target = site / entry
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            target.symlink_to(Path(str(package.locate_file(str(entry)))).resolve())


def _entry(file: Path, files: list[Path]) -> Path:
    """The entry of site-packages that contains `file`: a top folder or file. If several packages share the top folder,
    as with `google`, the folder below it."""
    top = Path(file.parts[0])
    is_shared = len(file.parts) > 1 and top / "__init__.py" not in files and "." not in top.name
    return Path(*file.parts[:2]) if is_shared else top


if __name__ == "__main__":
    main()
