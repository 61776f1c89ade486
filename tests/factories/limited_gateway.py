"""A gateway in its own process that may open few files: `limited_gateway MODEL CERTIFICATES SOFT HARD`.

Prints its ports as a JSON object when it serves, and ends when its stdin ends.
"""

import asyncio
import json
import resource
import sys
from pathlib import Path

from baton.config import Tls
from tests.factories.certificates import CertificateFiles
from tests.factories.gateway import gateway_with


async def serve(folder: Path, files: CertificateFiles) -> None:
    async with gateway_with(
        folder, {}, {}, max_connections=16, tls=Tls(**files.tls()), credentials=files.credentials()
    ) as under_test:
        ports = {"http": under_test.gateway.http_port, "grpc": under_test.gateway.grpc_port}
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    model, certificates, soft, hard = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    asyncio.run(serve(Path(model), CertificateFiles(Path(certificates))))
