"""Hostile callers against `baton serve` as a user starts it, with a tiny model. They must not affect other callers.

    python -m tests.hostile [--streams 16] [--calls 5] [--json FILE]
        [--scenes grammars kept-grammars answers standstill handshakes sessions ray-folder idle texts tenants]

Beside the first four streams run, greedy, sampled and with grammars, and each has to end as it would undisturbed, on
the same workers. Prints what each scene saw. Ends with 1 if anything was not as it should be.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from baton.system.secret import SECRET_VARIABLE
from tests.factories.models import make_model_dir
from tests.factories.security import SECRET
from tests.factories.serving import serving_with_forks
from tests.hostile.bystanders import settle_town
from tests.hostile.edges import EDGES
from tests.hostile.finding import Finding
from tests.hostile.idle import idle_connections
from tests.hostile.scenes import SCENES
from tests.hostile.tenants import tenants
from tests.hostile.texts import texts

APART = EDGES | {"idle": idle_connections, "texts": texts, "tenants": tenants}
"""Scenes with a fleet of their own."""

CONFIG = """
model: {{path: {model}, dtype: float32}}
engine: {{kv_cache_memory_mib: 64, num_threads: 1}}
cluster: {{ray_address: none, prefill: 1, decode: 2}}
scheduler: {{max_num_seqs: 256}}
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ[SECRET_VARIABLE] = SECRET.text
    with tempfile.TemporaryDirectory() as folder:
        findings = play(options, Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    return 1 if any(finding.wrong for finding in findings) else 0


def play(options: argparse.Namespace, folder: Path) -> list[Finding]:
    """Each scene's finding, printed as soon as it is there. Scenes of a town share one fleet."""
    model = make_model_dir(folder / "model", max_position_embeddings=4096)
    findings = []
    if any(name in SCENES for name in options.scenes):
        findings += play_in_town(options, model, folder)
    for name in options.scenes:
        if name in APART:
            scratch = folder / name
            scratch.mkdir()
            findings.append(APART[name](model, scratch))
            print(findings[-1].text(), flush=True)
    return findings


def play_in_town(options: argparse.Namespace, model: Path, folder: Path) -> list[Finding]:
    """Plays the scenes of a town on one fleet, which must end cleanly after them."""
    config = folder / "baton.yaml"
    config.write_text(CONFIG.format(model=model))
    with serving_with_forks(str(config)) as serve:
        ready = serve.wait_ready()
        scenes = _scenes(options, ready["target"], ready["http"], serve.process.pid)
        findings = asyncio.run(scenes)
        serve.interrupt()
        code = serve.wait_gone()
        findings[-1].expect(code == 0, f"baton serve ended with {code}:\n{serve.stderr[-3000:]}")
    return findings


async def _scenes(options: argparse.Namespace, target: str, http: str, pid: int) -> list[Finding]:
    town = await settle_town(target, http, pid, seed=1)
    findings = []
    for name in options.scenes:
        if name in SCENES:
            findings.append(await SCENES[name](town, options.streams, options.calls))
            print(findings[-1].text(), flush=True)
    return findings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scenes", nargs="+", choices=[*SCENES, *APART], default=[*SCENES, *APART], help="default: all"
    )
    parser.add_argument("--streams", type=int, default=16, help="beside each attack, default %(default)s")
    parser.add_argument("--calls", type=int, default=5, help="of each hostile caller, default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
