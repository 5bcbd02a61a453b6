"""Tandem post-trains language models while they serve. `import tandem` is light; torch comes with the first call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The Python API: name -> where it lives. Filled in lazily so that `tandem --help` stays quick.
_API = {
    "run": "tandem.recipes",
    "resume": "tandem.recipes",
    "digest_run": "tandem.runs.resume",
    "supervise_run": "tandem.runs.supervise",
    "sweep": "tandem.recipes.sweep",
    "plan_run": "tandem.runs.plan",
    "diagnose": "tandem.runs.doctor",
    "serve_model": "tandem.recipes.serve",
    "serve_engine": "tandem.recipes.serve",
    "serve_gateway": "tandem.recipes.gateway",
    "serve_rollouts": "tandem.recipes.rollouts",
    "serve_online": "tandem.recipes.online",
    "rollouts_status": "tandem.obs.rollouts_status",
    "install_engine": "tandem.recipes.engines",
    "check_engine": "tandem.recipes.engines",
    "chat_with": "tandem.recipes.serve",
    "write_report": "tandem.obs.report",
    "watch_run": "tandem.runs.watch",
    "audit_sync": "tandem.obs.audit",
    "sync_status": "tandem.obs.sync_status",
    "bench_sync": "tandem.recipes.sync_bench",
    "evaluate_model": "tandem.recipes.evaluation",
    "export_run": "tandem.recipes.export",
    "compare_runs": "tandem.runs.compare",
    "push_artifacts": "tandem.runs.uploads",
    "list_artifacts": "tandem.runs.artifacts",
    "fetch_artifact": "tandem.runs.artifacts",
    "load_environment": "tandem.env.load",
    "new_environment": "tandem.env.scaffold",
    "try_environment": "tandem.env.human",
    "serve_environment": "tandem.recipes.environments",
    "load_spec": "tandem.spec.load",
    "json_schema": "tandem.spec.load",
    "Task": "tandem.types",
    "Outcome": "tandem.types",
    "Sampling": "tandem.types",
    "Trajectory": "tandem.types",
}

__all__ = ["__version__", *_API]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module 'tandem' has no attribute '{name}'; it has {', '.join(__all__)}")
