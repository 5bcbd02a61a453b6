"""Jobs of a Ray cluster, by its jobs API over HTTP. Ray itself is not imported."""

from __future__ import annotations

import asyncio
import base64
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import httpx
from pydantic import Field

from tandem.errors import MaybeLaunched, ProviderRefused, ProviderSilent
from tandem.job_types import Handle, Job, Need, Offer, Sight
from tandem.providers.settings import TargetSettings, check_job, checked_name, checked_path
from tandem.providers.shell import exports

_ENV = "TANDEM_JOB_ENV"
_CODE_LINE = "tandem: exit code "
_CONSOLE = "console"
_STATES: Mapping[str, Literal["waiting", "running"]] = {"PENDING": "waiting", "RUNNING": "running"}

# What Ray runs. Ray sends SIGTERM to all processes that it finds below this shell, and SIGKILL later. It does not find
# those that left, and keeps no exit code of a job that was stopped: the shell sees to both.
_WRAPPER = """
mkdir -p {directory}/.job && cd {directory} || exit 70
{tidy}
mkdir .job/begun || {{ echo "tandem: this job has begun before; it does not begin again"; exit 75; }}
export TANDEM_JOB="$PWD"
eval "$(printf %s "${env}" | base64 -d)"; unset {env}
sweep() {{
  for round in 1 2 3; do
    for file in $(grep -slzxF "TANDEM_JOB=$PWD" /proc/[0-9]*/environ); do
      file=${{file%/environ}}; kill -KILL "${{file#/proc/}}" 2> /dev/null
    done
  done
}}
asked= again= code=
trap 'again=1; [ -n "$asked" ] || {{ asked=1; (trap "" TERM; sleep {stop_s}; sweep) & }}' TERM
{command} &
child=$!
while again=; wait "$child"; got=$?; [ -n "$code" ] && [ $got -eq 127 ] || code=$got; [ -n "$again" ]; do :; done
[ -z "$asked" ] || sweep
echo $code > .job/rc
echo "{told}$code"
exit $code
"""
_TIDY = """find .. -mindepth 2 -maxdepth 2 -name .job -mtime +{days} | head -n 20 | while read -r old; do
  [ ! -e "$old/rc" ] || rm -rf "${{old%/.job}}"
done"""


class RaySettings(TargetSettings):
    """A Ray cluster. Its jobs wait until Ray has what they ask for."""

    kind: Literal["ray"] = "ray"
    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Of the dashboard, as in "http://head:8265"."""
    token_file: str = ""
    """File of the cluster's token, where it has one (RAY_AUTH_MODE=token)."""
    directory: str = Field(default="~/tandem-jobs", min_length=1)
    """Where jobs have their directories on the nodes."""
    gpu_memory_gib: float = Field(default=0.0, ge=0)
    """Memory of each GPU, which Ray does not know; 0: a job that asks for GPU memory is refused."""
    stop_s: int = Field(default=10, ge=1)
    """Seconds from SIGTERM to SIGKILL when a job is ended. Ray wants to know them when the job is started."""


class RayProvider:
    """Submits command lines to Ray, under the job's own name."""

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings

    async def offers(self, need: Need) -> list[Offer]:
        """Return an offer for each kind of node: "node", or its GPU."""
        told = await self._get("/nodes", {"view": "summary"})
        offers: dict[str, Offer] = {}
        for node in told["data"]["summary"]:
            raylet = node.get("raylet") or {}
            if raylet.get("state") == "ALIVE":
                offer = self._offer(raylet.get("resourcesTotal") or {})
                same = offers.get(offer.name)
                offers[offer.name] = offer if same is None else same.beside(offer)
        return [_measured(offer, need) for offer in offers.values()]

    async def launch(self, job: Job) -> Handle:
        """Submit the job, unless it was submitted."""
        check_job(job, "ray")
        try:
            offers = [each for each in await self.offers(job.need) if job.offer in ("", each.name)]
            if not any(each.fits for each in offers):
                told = "; ".join(f"{each.name}: {each.why_not}" for each in offers)
                raise ProviderRefused(f"no node of Ray can meet the need: {told or 'there is none'}")
            answer = await self._ask("POST", "/api/jobs/", json=self._submission(job, offers))
        except ProviderSilent as error:
            raise MaybeLaunched(f"{job.name}: {error}") from error
        if answer.status_code == 200 or "already exists" in answer.text:
            return Handle(job.name)
        if answer.status_code < 500:
            raise ProviderRefused(f"Ray refuses '{job.name}': {answer.text:.300}")
        raise MaybeLaunched(f"{job.name}: Ray answers with {answer.status_code}: {answer.text:.300}")

    async def find(self, prefix: str) -> list[Handle]:
        """Return every job that Ray remembers: all since its head was started."""
        checked_name(prefix, prefix=True)
        return [Handle(name) for name in await self._jobs() if name.startswith(prefix)]

    async def look(self, handles: Sequence[Handle]) -> list[Sight]:
        """Return a sight of each, by one request for all, and one more for each that was stopped."""
        if not handles:
            return []
        try:
            jobs = await self._jobs()
            return [await self._sight(handle, jobs.get(handle.name)) for handle in handles]
        except (ProviderSilent, ProviderRefused) as error:
            return [Sight(handle, "unknown", why=str(error)) for handle in handles]

    async def end(self, handle: Handle, grace_s: float) -> None:
        """Have Ray stop the job, and wait until it has. The grace is `stop_s`, since Ray takes none."""
        name = checked_name(handle.name)
        answer = await self._ask("POST", f"/api/jobs/{name}/stop")
        if answer.status_code not in (200, 404):
            raise ProviderSilent(f"Ray answers with {answer.status_code}: {answer.text:.300}")
        until = time.monotonic() + self.settings.stop_s + 10
        while time.monotonic() < until and (await self._jobs()).get(name, {}).get("status") in _STATES:
            await asyncio.sleep(0.2)

    async def read(self, handle: Handle, path: str, offset: int, limit: int) -> bytes:
        """Return bytes of what the job printed, with Ray's own lines. Ray's API shows no other file."""
        name, path = checked_name(handle.name), checked_path(path)
        if path != _CONSOLE:
            raise ProviderRefused(f"path = '{path}': Ray's API shows '{_CONSOLE}', and no other file")
        return (await self._log(name)).encode()[offset : offset + limit]

    # --- what Ray is told and tells

    def _submission(self, job: Job, offers: Sequence[Offer]) -> dict[str, Any]:
        need, stop_s = job.need, self.settings.stop_s
        resources = {}
        if need.gpus and need.gpu:
            chosen = next(each for each in offers if each.fits)
            resources = {f"accelerator_type:{chosen.gpu}": 0.001}
        root = self.settings.directory
        path = f'"$HOME"/{shlex.quote(root[2:] + "/" + job.name)}' if root.startswith("~/") else shlex.quote(
            f"{root}/{job.name}"
        )  # fmt: skip
        days = self.settings.keep_days
        script = _WRAPPER.format(
            tidy=_TIDY.format(days=days) if days else "", directory=path, env=_ENV, command=shlex.join(job.argv),
            stop_s=stop_s, told=_CODE_LINE,
        )  # fmt: skip
        secret = base64.b64encode(exports(job.env).encode()).decode()
        return {
            "submission_id": job.name,
            "entrypoint": f"exec sh -c {shlex.quote(script)}",
            "entrypoint_num_cpus": need.cpus,
            "entrypoint_num_gpus": need.gpus,
            "entrypoint_memory": int(need.memory_gib * 2**30) or None,
            "entrypoint_resources": resources or None,
            "runtime_env": {"env_vars": {_ENV: secret, "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s + 5)}},
        }

    def _offer(self, resources: Mapping[str, Any]) -> Offer:
        gpus = int(resources.get("GPU", 0))
        kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        gpu = kinds[0] if gpus and kinds else ""
        return Offer(
            gpu or ("gpu" if gpus else "node"), gpus, gpu, self.settings.gpu_memory_gib if gpus else 0.0,
            int(resources.get("CPU", 0)), round(float(resources.get("memory", 0)) / 2**30, 1), 1,
            self.settings.usd_per_hour,
        )  # fmt: skip

    async def _sight(self, handle: Handle, job: Mapping[str, Any] | None) -> Sight:
        if job is None:
            return Sight(handle, "gone", why="Ray has no job of this name")
        status, code = str(job["status"]), job.get("driver_exit_code")
        if status in _STATES:
            return Sight(handle, _STATES[status], why=str(job.get("message") or ""))
        if code is None and status == "STOPPED":
            last = (await self._log(checked_name(handle.name))).strip().splitlines()[-1:]
            told = last[0].removeprefix(_CODE_LINE) if last and last[0].startswith(_CODE_LINE) else ""
            code = int(told) if told.isdecimal() else None
        if status == "SUCCEEDED" or code is not None:
            return Sight(handle, "ended", (lambda number: number if number >= 0 else 128 - number)(int(code or 0)))
        return Sight(handle, "gone", why=f"Ray: {status}: {job.get('message') or ''}"[:300])

    async def _jobs(self) -> dict[str, Mapping[str, Any]]:
        told = cast("list[dict[str, Any]]", await self._get("/api/jobs/"))
        return {str(job["submission_id"]): job for job in told if job.get("submission_id")}

    async def _log(self, name: str) -> str:
        answer = await self._ask("GET", f"/api/jobs/{name}/logs")
        return str(answer.json()["logs"]) if answer.status_code == 200 else ""

    async def _get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        answer = await self._ask("GET", path, params=params)
        if answer.status_code != 200:
            raise ProviderSilent(f"Ray answers with {answer.status_code}: {answer.text:.300}")
        try:
            return answer.json()
        except ValueError as error:
            raise ProviderSilent(f"Ray: an answer that is none: {answer.text:.200}") from error

    async def _ask(self, method: str, path: str, **what: Any) -> httpx.Response:
        headers = {}
        if self.settings.token_file:
            token = Path(self.settings.token_file).expanduser().read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}"}
        try:
            async with httpx.AsyncClient(timeout=self.settings.timeout_s, headers=headers, trust_env=False) as client:
                return await client.request(method, self.settings.url.rstrip("/") + path, **what)
        except httpx.TransportError as error:
            raise ProviderSilent(f"{self.settings.url}: {type(error).__name__}: {error}") from error


def _measured(offer: Offer, need: Need) -> Offer:
    why = ""
    if need.gpus > offer.gpus:
        why = f"a node has {offer.gpus} GPUs"
    elif need.gpus and need.gpu.lower() not in offer.gpu.lower():
        why = f"its GPUs are '{offer.gpu}'"
    elif need.gpus and need.gpu_memory_gib > offer.gpu_memory_gib:
        why = "Ray does not know the memory of its GPUs, or they have less; gpu_memory_gib of the target says it"
    elif need.cpus > offer.cpus or need.memory_gib > offer.memory_gib:
        why = f"a node has {offer.cpus} CPUs and {offer.memory_gib:g} GiB"
    elif need.hosts > 1:
        why = "a job of Ray's is one host"
    return replace(offer, fits=False, now=False, why_not=why) if why else offer
