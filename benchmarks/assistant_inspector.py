"""Every tool of the MCP server by the protocol's own inspector, another client than the tests' one.

    npm install --prefix DIR @modelcontextprotocol/inspector
    python benchmarks/assistant_inspector.py DIR/node_modules/.bin/mcp-inspector

A real control server, a real run and a model behind a name; each tool over stdio and over HTTP at /mcp. The inspector's
command line cannot ask a person, so the tools that must ask one refuse, in words, and change nothing. Exit code 1 if a
tool is missing, a reading one gives an error, or an asking one goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "control"))
from whole_way import Control, spec_of, until

from common import table

SCOPES = ("runs:read", "runs:write", "deploy", "chat")
REFUSED = ("cannot ask a person", "call plan first")  # over stdio each call is a process, which has planned nothing
Called = dict[str, Any]


def calls(run: str, spec: str) -> tuple[Called, Called]:
    """Arguments of the tools that answer at once, and of those that ask a person first."""
    messages = json.dumps([{"role": "user", "content": "hi"}])
    reading: Called = {
        "list_runs": {}, "get_run": {"run": run}, "explain": {"run": run}, "read_log": {"run": run},
        "get_metrics": {"run": run, "names": '["reward/*"]'}, "read_samples": {"run": run},
        "compare": {"runs": json.dumps([run, run])}, "targets": {},
        "plan": {"spec_toml": spec, "target": "here", "max_cost_usd": 1},
        "watch": {"run": run, "seconds": 1}, "usage": {}, "list_checkpoints": {"run": run}, "deployments": {},
        "chat": {"model": "support", "messages": messages, "max_tokens": 8},
    }  # fmt: skip
    asking: Called = {
        "submit": {"spec_toml": spec, "target": "here", "max_cost_usd": 1},
        "resume": {"run": run}, "cancel": {"run": run}, "deploy": {"run": run, "step": 1, "name": "support"},
        "promote": {"name": "support", "revision": 1}, "rollback": {"name": "support"}, "undeploy": {"name": "support"},
    }  # fmt: skip
    return reading, asking


class Inspector:
    def __init__(self, program: str, config: Path, server: str) -> None:
        self._command = [program, "--cli", "--config", str(config), "--server", server]

    def asked(self, *words: str) -> Any:
        done = subprocess.run([*self._command, *words], capture_output=True, text=True, timeout=120)
        text = done.stdout or done.stderr
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return {"isError": True, "content": [{"text": text.strip()[-300:]}]}

    def call(self, tool: str, arguments: Called) -> tuple[bool, str]:
        """Whether it was an error, and what it said."""
        given = [word for name, value in arguments.items() for word in ("--tool-arg", f"{name}={value}")]
        told = self.asked("--method", "tools/call", "--tool-name", tool, *given)
        return bool(told.get("isError")), told["content"][0]["text"]


def through(inspector: Inspector, reading: Called, asking: Called) -> list[list[str]]:
    listed = {tool["name"] for tool in inspector.asked("--method", "tools/list")["tools"]}
    odd = sorted(listed ^ (reading.keys() | asking.keys()))
    rows = [["tools/list", f"{len(listed)} tools" + (f", not expected: {odd}" if odd else ""), "NO" if odd else "yes"]]
    for name, arguments in reading.items():
        failed, said = inspector.call(name, arguments)
        rows.append([name, " ".join(said.split())[:70], "NO" if failed else "yes"])
        if name == "plan" and not failed:
            asking["submit"]["plan_digest"] = json.loads(said)["plan_digest"]
    for name, arguments in asking.items():
        failed, said = inspector.call(name, arguments)
        rows.append(
            [name, " ".join(said.split())[:110], "yes" if failed and any(each in said for each in REFUSED) else "NO"]
        )
    return rows


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        control = Control(home)
        try:
            run = control.submit(3, model={"preset": "tiny", "lora": {"rank": 4}})
            until(lambda: control.state(run) == "succeeded", 300)
            control.ask("POST", "/api/deployments", {"name": "support", "run": run, "step": 2})
            until(lambda: control.ask("GET", "/api/deployments/support")["revisions"][0]["ready"], 240)
            before = control.ask("GET", "/api/deployments/support")["revisions"]
            key, address = control.key(*SCOPES), f"http://127.0.0.1:{control.port}"
            variables = {**os.environ, "TANDEM_CONTROL": address, "TANDEM_CONTROL_KEY": key}
            servers = {
                "stdio": {
                    "command": sys.executable, "args": ["-P", "-m", "tandem", "mcp", "--runs", str(home)],
                    "env": variables,
                },
                "http": {"type": "http", "url": f"{address}/mcp", "headers": {"Authorization": f"Bearer {key}"}},
            }  # fmt: skip
            config = home / "mcp.json"
            config.write_text(json.dumps({"mcpServers": servers}))
            for name in servers:
                rows = through(Inspector(sys.argv[1], config, name), *calls(run, spec_of(home, 3)))
                bad += sum(row[2] == "NO" for row in rows)
                table([f"over {name}", "said", "as it must"], rows)
            after = control.ask("GET", "/api/deployments/support")["revisions"]
            if [each["weight"] for each in before] != [each["weight"] for each in after] or len(before) != len(after):
                bad += 1
                print("an asking tool changed what is served")
        finally:
            control.close()
    print("all tools" if not bad else f"{bad} not as they must")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
