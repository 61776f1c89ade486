"""The `buf curl` commands of docs/api.md, run as they stand there."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_tokenizer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/api.md"
ANSWER = make_tokenizer().encode("The cache is the baton").ids


def commands() -> list[str]:
    text = DOCUMENT.read_text().replace("\\\n", " ")
    return re.findall(r"^buf curl .*$", text, re.MULTILINE)


async def test_the_documented_commands_work(folder: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def output_of(command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        target = under_test.grpc_target
        methods, answer, cluster, health = [
            await asyncio.to_thread(output_of, command.replace("localhost:50051", target))
            for command in commands()
        ]
    assert "baton.v1.ClusterService/WatchCluster" in methods
    assert "The cache is the baton" in answer
    assert '"model": "tiny"' in cluster
    assert '"status": "SERVING"' in health
