"""Wheels of environments, made by hand: right ones, and wrong ones of every kind."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from tandem.spec.package_names import normalized

CODE = """
from tandem.types import Outcome, Task


class Shout:
    \"\"\"Answer in capitals.\"\"\"

    def __init__(self, words: int = 40) -> None:
        self.words = words

    def tasks(self, split):
        return [Task(f"{split} {n}", ({"role": "user", "content": f"{split} {n}"},)) for n in range(self.words)]

    async def run(self, task, chat):
        reply = await chat.reply()
        return Outcome(sum(each.isupper() for each in reply.text) / (len(reply.text) + 1))
"""


def wheel(
    name: str = "default-shout",
    version: str = "1.0",
    *,
    code: str = CODE,
    module: str = "shout_env",
    metadata: str = "",
    entry: str = "",
    more: Mapping[str, bytes] | None = None,
    requires: tuple[str, ...] = (),
    change: Callable[[dict[str, bytes]], None] = lambda files: None,
    after: Callable[[dict[str, bytes]], None] = lambda files: None,
) -> tuple[str, bytes]:
    """Return a wheel's file name and bytes. `change`: of the files before RECORD is written; `after`: after it."""
    escaped = normalized(name).replace("-", "_")
    info = f"{escaped}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: shouts\nRequires-Python: >=3.11"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    files = {
        f"{module}.py": code.encode(),
        f"{info}/METADATA": (metadata or "\n".join([*lines, ""])).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": (entry or f"[tandem.environments]\nshout = {module}:Shout\n").encode(),
        **(more or {}),
    }
    change(files)
    record = [f"{each},sha256={digest(data)},{len(data)}" for each, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    after(files)
    return f"{escaped}-{version}-py3-none-any.whl", zipped(files)


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def zipped(files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return written.getvalue()


def push_body(made: tuple[str, bytes], **more: Any) -> dict[str, Any]:
    file, content = made
    sha256 = hashlib.sha256(content).hexdigest()
    return {"file": file, "sha256": sha256, "wheel": base64.b64encode(content).decode(), **more}
