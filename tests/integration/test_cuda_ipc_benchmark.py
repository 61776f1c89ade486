"""benchmarks/cuda_ipc.py on a pretended device: it prints every requested figure."""

import json
from pathlib import Path

from benchmarks.cuda_ipc import DRY_MIB, main


def test_a_dry_run_measures_every_size_beside_a_plain_copy(tmp_path: Path) -> None:
    main(["--dry-run", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["device"] == "pretended"
    sizes = [(row["block_bytes"] // DRY_MIB, row["transfer_bytes"] // DRY_MIB) for row in figures["results"]]
    assert sizes == [(1, 2), (1, 8), (2, 2), (2, 8)]
    assert all(min(row["us"], row["copy_us"], row["share"]) > 0 for row in figures["results"])
