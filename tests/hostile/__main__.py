"""Hostile callers against `baton serve` as a user starts it, with a tiny model: nothing that they do may reach others.

    python -m tests.hostile [--scenes grammars answers standstill] [--streams 16] [--json FILE]

Beside every attack streams run, greedy, sampled and with grammars, and each has to end as it would undisturbed, on the
same workers. Prints a row for each scene. Ends with 1 if anything of this did not hold.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from cluster.secret import SECRET_VARIABLE
from tests.factories.models import make_model_dir
from tests.factories.security import SECRET
from tests.factories.serving import serving
from tests.hostile.bystanders import settle_town
from tests.hostile.finding import Finding
from tests.hostile.scenes import SCENES

CONFIG = """
model: {{path: {model}, dtype: float32}}
engine: {{kv_cache_memory_mib: 64, num_threads: 1}}
cluster: {{ray_address: none, prefill: 1, decode: 2}}
scheduler: {{max_num_seqs: 64}}
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    findings = play(options.scenes, options.streams)
    for finding in findings:
        print(finding.text(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    return 1 if any(finding.wrong for finding in findings) else 0


def play(names: list[str], num_streams: int) -> list[Finding]:
    """All scenes on one fleet, which has to end cleanly after them."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "baton.yaml"
        model = make_model_dir(Path(folder) / "model", max_position_embeddings=4096)
        config.write_text(CONFIG.format(model=model))
        with serving(str(config), environment={SECRET_VARIABLE: SECRET.text}) as serve:
            ready = serve.wait_ready()
            findings = asyncio.run(
                _scenes(names, ready["target"], ready["http"], serve.process.pid, num_streams)
            )
            serve.interrupt()
            code = serve.wait_gone()
            findings[-1].expect(code == 0, f"baton serve ended with {code}:\n{serve.stderr[-3000:]}")
    return findings


async def _scenes(names: list[str], target: str, http: str, pid: int, num_streams: int) -> list[Finding]:
    town = await settle_town(target, http, pid, seed=1)
    return [await SCENES[name](town, num_streams) for name in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES), help="default: all")
    parser.add_argument("--streams", type=int, default=16, help="beside each attack, default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
