"""200 uploads to a server that cuts, refuses and truncates: `make uploads-cut`. Exit code 1 if a figure is missed."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tandem.errors import ArtifactError
from tandem.runs.artifacts import ArtifactStore
from tandem.runs.storage_retry import Limits

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
from object_server import ObjectServer, served


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--uploads", type=int, default=200)
    options.add_argument("--share", type=float, default=0.2, help="of requests with a fault")
    asked = options.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    began, published, partial = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as root, served(ObjectServer(seed=1, share=asked.share)) as server:
        for trial in range(asked.uploads):
            source = Path(root) / f"run-{trial}"
            source.mkdir()
            for name in ("config.json", "model.safetensors"):
                (source / name).write_bytes(random.Random(f"{trial}{name}").randbytes(3000))
            limits = Limits(tries=1 + trial % 4, backoff_s=0.01, timeout_s=30)
            try:
                ArtifactStore("s3://bucket/runs", endpoint=server.url, limits=limits).push(source.name, source)
                published += 1
            except ArtifactError:
                pass
        server.share = 0.0
        store = ArtifactStore("s3://bucket/runs", endpoint=server.url)
        seen = store.names()
        for name in seen:
            back = store.fetch(name, Path(root) / "back" / name)
            same = all((back / file.name).read_bytes() == file.read_bytes() for file in (Path(root) / name).iterdir())
            partial += not same
        faults = sum(server.done.values())
    seconds = time.monotonic() - began
    print(f"{asked.uploads} uploads, {faults} faults {dict(server.done)}, {seconds:.0f} s")
    print(f"published {published}, visible {len(seen)}, partial artifacts visible {partial}")
    sys.exit(bool(partial) or published > len(seen) or faults < asked.uploads / 2)


if __name__ == "__main__":
    main()
