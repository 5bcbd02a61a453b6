"""Ask a SkyPilot API server. skypilot.py sends this text to the Python that has SkyPilot; nothing here imports Tandem.

in: a line of JSON for each call: its name and its arguments. out: a line for each: {"ok": ...}, {"silent": why} where
no answer came, or {"refused": why}. SkyPilot's own prints go to stderr.

SkyPilot would put a job's environment into its database, and into arguments and files on the machine. What it starts
only waits, and a thread hands the job in over SSH. After the end of its input this process stays until all jobs are
handed in.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

_LIVE = ("PENDING", "WAITING", "RUNNING")
_OWN_REGIONS = ("slurm", "kubernetes", "ssh")
"""What has no regions with prices of their own."""
_HAND_IN_S = 3600
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class NeverSo(Exception):
    """What can never be as it was asked."""


class SkyPilotClient:
    """A SkyPilot API server. Every method but `answer` is a call."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._loaded: Any = None
        self._entries = threading.Lock()
        self._handing: dict[str, threading.Thread] = {}

    @property
    def _sdk(self) -> Any:
        """SkyPilot's SDK. It would start a server where none answers, so that is asked first."""
        if importlib.util.find_spec("sky") is None:
            raise NeverSo(f"{sys.executable} has no SkyPilot; `{sys.executable} -m pip install skypilot`")
        try:
            urllib.request.urlopen(f"{self._server}/api/health", timeout=10).close()
        except urllib.error.HTTPError:
            pass  # it wants a token: it is there
        except OSError as error:
            raise ConnectionError(f"no SkyPilot API server at {self._server} ({error}); `sky api start`") from error
        if self._loaded is None:
            self._sky = importlib.import_module("sky")
            self._loaded = importlib.import_module("sky.client.sdk")
        return self._loaded

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the machines by name, as [state, whether it was ever up], and the newest launch and end of each."""
        sdk = self._sdk
        told = sdk.get(sdk.status(all_users=True))
        found: dict[str, dict[str, Any]] = {
            "machines": {each["name"]: [each["status"].value, bool(each["cluster_ever_up"])] for each in told},
            "launch": {},
            "down": {},
        }
        fields = ["request_id", "name", "status", "cluster_name", "created_at"]
        for each in sorted(sdk.api_status(all_status=True, fields=fields), key=lambda each: each.created_at):
            kind = each.name.removeprefix("sky.")
            if kind in ("launch", "down") and each.cluster_name:
                before = found[kind].get(each.cluster_name)
                if before is None or before[0] not in _LIVE:
                    found[kind][each.cluster_name] = [each.status, each.request_id]
        for name, (status, _) in found["launch"].items():
            found["launch"][name][0] = "live" if status in _LIVE else status.lower()
        return found

    def there(self, name: str) -> bool:
        """Return whether the machine is there, by the word of its cloud."""
        sdk = self._sdk
        return bool(sdk.get(sdk.status([name], refresh=self._sky.StatusRefreshMode.FORCE, all_users=True)))

    def why(self, request: str) -> str:
        """Return why a request failed."""
        try:
            self._sdk.get(request)
        except Exception as error:  # noqa: BLE001 - whatever SkyPilot raises is the answer
            return plain(error)
        return ""

    def offers(self, gpus: bool) -> dict[str, Any]:
        """Return what is enabled, and with `gpus` the kinds of machines that have some, as rows of the catalogue."""
        sdk = self._sdk
        infra = sdk.get(sdk.enabled_clouds(expand=True))
        if not infra:
            raise NeverSo("SkyPilot has no cloud, Kubernetes or Slurm that it may use; `sky check` says why")
        rows: list[list[Any]] = []
        if gpus:
            clouds = sorted({each.split("/")[0].lower() for each in infra})
            kinds = sdk.get(sdk.list_accelerators(clouds=clouds, all_regions=True))
            for each in (each for some in kinds.values() for each in some):
                cloud = each.cloud.lower()
                row = [cloud, "" if cloud in _OWN_REGIONS else each.region, each.instance_type or ""]
                row += [each.accelerator_name, *map(number, (each.accelerator_count, each.device_memory))]
                rows.append([*row, *map(number, (each.cpu_count, each.memory, each.price))])
        return {"infra": [each.lower() for each in infra], "gpus": rows}

    def launch(self, name: str, task: dict[str, Any], command: list[str], text: str, days: int) -> None:
        """Have SkyPilot start a machine of this name, unless it ever did, and hand the job in once it is there."""
        sdk, facts = self._sdk, self.facts()
        request = facts["launch"].get(name, ["", ""])[1]
        if name not in facts["machines"] and not request:
            if any(each["name"] == name for each in sdk.get(sdk.cost_report(days=days))):
                return  # it was, and is no more
            try:
                request = sdk.launch(self._sky.Task.from_yaml_config(task), cluster_name=name)
            except (ValueError, self._sky.exceptions.InvalidClusterNameError) as error:
                raise NeverSo(plain(error)) from error
        if name not in self._handing or not self._handing[name].is_alive():
            self._handing[name] = threading.Thread(target=self._hand_in, args=(name, request, command, text))
            self._handing[name].start()

    def _hand_in(self, name: str, request: str, command: list[str], text: str) -> None:
        deadline = time.monotonic() + _HAND_IN_S
        if request:
            try:
                self._sdk.get(request)
            except Exception:  # noqa: BLE001 - whatever it is: `facts` tells that the launch failed
                return
        while time.monotonic() < deadline:
            with suppress(Exception):  # the network, the machine, the server: they may come back
                self.entry(name)
                given = subprocess.run(command, input=text.encode(), check=False, timeout=120)
                if given.returncode == 0 or name not in self.facts()["machines"]:
                    return
            time.sleep(2)

    def entry(self, name: str) -> None:
        """Have SkyPilot write how OpenSSH reaches the machine; only its command does that."""
        with self._entries:
            if not Path(f"~/.sky/generated/ssh/{name}").expanduser().exists():
                command = [os.path.join(os.path.dirname(sys.executable), "sky"), "status", name]
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False, timeout=120)

    def down(self, name: str) -> None:
        """Ask for the end of a machine, and of its launch."""
        sdk, facts = self._sdk, self.facts()
        state, request = facts["launch"].get(name, ["", ""])
        if state == "live":
            sdk.get(sdk.api_cancel(request, all_users=True, silent=True))
        if name in facts["machines"] and facts["down"].get(name, [""])[0] not in _LIVE:
            sdk.down(name)

    def answer(self, line: str) -> dict[str, Any]:
        """Return the answer to a line."""
        call = json.loads(line)
        try:
            return {"ok": getattr(self, call.pop("call"))(**call)}
        except NeverSo as error:
            return {"refused": plain(error)}
        except Exception as error:  # noqa: BLE001 - of SkyPilot, of the network: all are no answer
            return {"silent": plain(error)}


def number(value: Any) -> float:
    """Return a number of the catalogue; -1 where it has none."""
    return float(value) if value is not None and value == value else -1.0


def plain(error: BaseException) -> str:
    return _COLORS.sub("", f"{error}" or type(error).__name__).strip()[:600]


def main(server: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    client = SkyPilotClient(server)
    for line in sys.stdin:
        print(json.dumps(client.answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
