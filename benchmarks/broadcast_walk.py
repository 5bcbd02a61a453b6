"""Which source files take part in one `broadcast` sync: `python benchmarks/broadcast_walk.py`.

Publishes a version from a trainer of the tiny preset to a `server` engine in its own process, on the CPU, over the
real bridge and HTTP. From the start of `Publisher.publish` until digests are compared, both processes record each
file of src/tandem in which a function is entered. The engine is attached before, and the canary comes after: it takes
the path of any rollout. vLLM needs its own Python environment, so its files are read and not run: `VLLM` names the
functions of the walk, and the script fails if one is gone.

Not counted: files that hold data or settings (`types`, `errors`, `protocols`, `spec/`); `io/leash`, which ends a
process whose parent died; and, listed apart, the HTTP layer that every request of every service passes.
"""

from __future__ import annotations

import ast
import asyncio
import json
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tandem

HERE, SOURCE = Path(__file__).resolve(), Path(tandem.__file__).resolve().parent
NOT_COUNTED = ("types.py", "errors.py", "protocols.py", "spec/", "io/leash.py")
HTTP = ("serve/http/", "serve/openai/requests.py", "io/bounded_json.py")
HF = ("engine/hf/", "ops/named_tensors.py")
"""What the `server` engine serves with, where vLLM's engine process has the files of `VLLM["control"]`."""
FOLDER = "TANDEM_WALK"

VLLM = {
    "control": {
        "engine/vllm/engine.py": ("load",),
        "engine/vllm/weight_update.py": ("load", "_load_full", "_until_here", "workers", "_whole", "fingerprints"),
        "engine/vllm/process.py": ("shut", "open", "post"),
        "engine/http/client.py": ("ask",),
        "io/finish_anyway.py": ("to_its_end",),
        "ops/phase_timer.py": ("end",),
        "ops/digest.py": ("combine", "text"),
    },
    "worker": {
        "vllm_worker/extension.py": ("tandem_stage", "tandem_load", "tandem_proof"),
        "vllm_worker/worker.py": ("stage", "load", "_receive", "_overwrite", "proof"),
        "vllm_worker/served_memory.py": ("forms", "check", "moves", "write", "check_served"),
        "vllm_worker/token_recorder.py": ("serve",),
        "bridge/collective/receiver.py": ("receive",),
        "bridge/collective/control_channel.py": ("newest", "read", "claim"),
        "bridge/collective/process_group.py": ("broadcast", "free"),
        "bridge/common/manifest.py": ("view",),
        "bridge/common/deadline.py": ("call",),
        "ops/digest.py": ("take",),
        "ops/batched_launches.py": ("copy_all",),
        "ops/phase_timer.py": ("end",),
    },
}


def record(folder: Path) -> Callable[[], None]:
    """Record the functions that this process enters while the first byte of `folder`/on is 1. Return what writes
    them down."""
    with (folder / "on").open("rb") as file:
        is_on = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    entered: dict[str, set[str]] = {}

    def enter(frame: Any, event: str, _: Any) -> None:
        if is_on[0] == 1 and event == "call":
            entered.setdefault(frame.f_code.co_filename, set()).add(frame.f_code.co_qualname)

    def write() -> None:
        sys.setprofile(None)
        inside = {
            str(Path(name).relative_to(SOURCE)): sorted(functions)
            for name, functions in entered.items()
            if name.startswith(str(SOURCE))
        }
        (folder / f"{os.getpid()}.json").write_text(json.dumps(inside))

    threading.setprofile(enter)
    sys.setprofile(enter)
    return write


async def publish(home: Path, on: mmap.mmap) -> None:
    from tandem.build import built_model, run_engines, training
    from tandem.recipes.sync_bench import bench_spec, move_weights

    spec = bench_spec("broadcast", "tiny", "cpu", "server", home)
    model = built_model.run_model(spec, None)
    joined = run_engines.join(spec, model, home)
    publisher = run_engines.publisher(joined, model, spec.sync.deadline_s, asyncio.to_thread)
    trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, spec.seed)
    try:
        await publisher.publish(trainer)
        await publisher.rest(trainer)
        move_weights(model, trainer)
        ask_canary = publisher._ask_canary

        async def asked(*args: Any, **options: Any) -> Any:
            on[0] = 0
            return await ask_canary(*args, **options)

        publisher._ask_canary = asked
        on[0] = 1
        await publisher.publish(trainer)
    finally:
        await joined.engine.close()
        joined.bridge.close()


def check_read() -> None:
    """Fail if a function that `VLLM` names is gone."""
    for files in VLLM.values():
        for name, functions in files.items():
            nodes = ast.walk(ast.parse((SOURCE / name).read_text()))
            there = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            if gone := set(functions) - there:
                sys.exit(f"{name}: no function {sorted(gone)}; mend VLLM in {HERE.name}")


def counted(files: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: files[name] for name in sorted(files) if not name.startswith((*NOT_COUNTED, *HTTP))}


def show(title: str, files: dict[str, list[str]]) -> None:
    print(f"\n{title}: {len(files)} files")
    for name, functions in files.items():
        print(f"  {name:42} {', '.join(functions)[:96]}")


def main() -> None:
    check_read()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "on").write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text(
            f"import os, sys\nsys.path.append({str(HERE.parent)!r})\n"
            f"import atexit\nfrom pathlib import Path\nfrom {HERE.stem} import record\n"
            f"atexit.register(record(Path(os.environ[{FOLDER!r}])))\n"
        )
        os.environ |= {FOLDER: name, "PYTHONPATH": os.pathsep.join([name, str(SOURCE.parent)])}
        with (folder / "on").open("r+b") as file:
            on = mmap.mmap(file.fileno(), 1)
        write = record(folder)
        asyncio.run(publish(folder / "home", on))
        write()
        found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    trainer = counted(found.pop(str(os.getpid())))
    (all_of_server,) = (files for files in found.values() if files)
    server = counted(all_of_server)
    show("trainer, measured", trainer)
    show("engine `server`, measured", server)
    control = {name: server[name] for name in server if not name.startswith((*HF, "bridge/"))}
    control = counted(control | {name: list(functions) for name, functions in VLLM["control"].items()})
    worker = counted({name: list(functions) for name, functions in VLLM["worker"].items()})
    show("vLLM's engine service, read", control)
    show("vLLM's worker, read", worker)
    show("the HTTP layer of every service, not counted", {n: f for n, f in all_of_server.items() if n.startswith(HTTP)})
    print(f"\nbroadcast to `server`: {len(trainer.keys() | server.keys())} files in two processes")
    print(f"broadcast to vLLM: {len(trainer.keys() | control.keys() | worker.keys())} files in three processes")


if __name__ == "__main__":
    main()
