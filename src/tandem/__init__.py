"""Tandem post-trains language models while they serve. `import tandem` is light; the first call imports torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; at run time _API below is used
    from tandem.env.catalog import list_environments as list_environments
    from tandem.env.human_player import try_environment as try_environment
    from tandem.env.load import load_environment as load_environment
    from tandem.env.scaffold import new_environment as new_environment
    from tandem.io.chat_feedback import feedback_rows as feedback_rows
    from tandem.io.kept_samples import samples as samples
    from tandem.obs.report import write_report as write_report
    from tandem.obs.rollouts_status import rollouts_status as rollouts_status
    from tandem.obs.sync_audit import audit_sync as audit_sync
    from tandem.obs.sync_status import sync_status as sync_status
    from tandem.protocols import Algorithm as Algorithm
    from tandem.protocols import Callback as Callback
    from tandem.protocols import Chat as Chat
    from tandem.protocols import Environment as Environment
    from tandem.protocols import OptimizerRule as OptimizerRule
    from tandem.protocols import Step as Step
    from tandem.protocols import StepTokens as StepTokens
    from tandem.recipes import resume as resume
    from tandem.recipes import run as run
    from tandem.recipes.atropos_run import run_atropos as run_atropos
    from tandem.recipes.base_rate import measure_base_rate as measure_base_rate
    from tandem.recipes.demonstration_check import check_demonstrations as check_demonstrations
    from tandem.recipes.engine_commands import check_engine as check_engine
    from tandem.recipes.engine_commands import install_engine as install_engine
    from tandem.recipes.environment_client import serve_environment as serve_environment
    from tandem.recipes.evaluation import evaluate_model as evaluate_model
    from tandem.recipes.export import export_run as export_run
    from tandem.recipes.gateway import serve_gateway as serve_gateway
    from tandem.recipes.model_check import check_model as check_model
    from tandem.recipes.online import serve_online as serve_online
    from tandem.recipes.own_loop import Trainer as Trainer
    from tandem.recipes.plan_run import plan_run as plan_run
    from tandem.recipes.rollout_service import serve_rollouts as serve_rollouts
    from tandem.recipes.serve import chat_with as chat_with
    from tandem.recipes.serve import serve_engine as serve_engine
    from tandem.recipes.serve import serve_model as serve_model
    from tandem.recipes.sweep import sweep as sweep
    from tandem.recipes.sync_bench import bench_sync as bench_sync
    from tandem.recipes.targets import list_targets as list_targets
    from tandem.runs.artifacts import fetch_artifact as fetch_artifact
    from tandem.runs.artifacts import list_artifacts as list_artifacts
    from tandem.runs.compare import compare_runs as compare_runs
    from tandem.runs.doctor import diagnose as diagnose
    from tandem.runs.explain import explain_run as explain_run
    from tandem.runs.first_spec import FirstAnswers as FirstAnswers
    from tandem.runs.first_spec import write_first_spec as write_first_spec
    from tandem.runs.run_ending import digest_run as digest_run
    from tandem.runs.run_list import list_runs as list_runs
    from tandem.runs.supervise import supervise_run as supervise_run
    from tandem.runs.uploads import push_artifacts as push_artifacts
    from tandem.runs.watch import watch_run as watch_run
    from tandem.serve.http.run import Listen as Listen
    from tandem.spec.load import json_schema as json_schema
    from tandem.spec.load import load_spec as load_spec
    from tandem.spec.load import parse_spec as parse_spec
    from tandem.types import Batch as Batch
    from tandem.types import Group as Group
    from tandem.types import MicroBatch as MicroBatch
    from tandem.types import Outcome as Outcome
    from tandem.types import Sampling as Sampling
    from tandem.types import Task as Task
    from tandem.types import TokenLogprobs as TokenLogprobs
    from tandem.types import Totals as Totals
    from tandem.types import Trajectory as Trajectory

__version__ = "0.1.0"

# The Python API: each name, and the module that it is imported from at its first use.
_API = {
    "run": "tandem.recipes",
    "run_atropos": "tandem.recipes.atropos_run",
    "resume": "tandem.recipes",
    "digest_run": "tandem.runs.run_ending",
    "supervise_run": "tandem.runs.supervise",
    "sweep": "tandem.recipes.sweep",
    "plan_run": "tandem.recipes.plan_run",
    "Trainer": "tandem.recipes.own_loop",
    "diagnose": "tandem.runs.doctor",
    "serve_model": "tandem.recipes.serve",
    "serve_engine": "tandem.recipes.serve",
    "serve_gateway": "tandem.recipes.gateway",
    "serve_rollouts": "tandem.recipes.rollout_service",
    "serve_online": "tandem.recipes.online",
    "rollouts_status": "tandem.obs.rollouts_status",
    "install_engine": "tandem.recipes.engine_commands",
    "check_model": "tandem.recipes.model_check",
    "check_engine": "tandem.recipes.engine_commands",
    "chat_with": "tandem.recipes.serve",
    "write_report": "tandem.obs.report",
    "explain_run": "tandem.runs.explain",
    "watch_run": "tandem.runs.watch",
    "samples": "tandem.io.kept_samples",
    "feedback_rows": "tandem.io.chat_feedback",
    "list_runs": "tandem.runs.run_list",
    "audit_sync": "tandem.obs.sync_audit",
    "sync_status": "tandem.obs.sync_status",
    "bench_sync": "tandem.recipes.sync_bench",
    "list_targets": "tandem.recipes.targets",
    "evaluate_model": "tandem.recipes.evaluation",
    "measure_base_rate": "tandem.recipes.base_rate",
    "check_demonstrations": "tandem.recipes.demonstration_check",
    "write_first_spec": "tandem.runs.first_spec",
    "FirstAnswers": "tandem.runs.first_spec",
    "export_run": "tandem.recipes.export",
    "compare_runs": "tandem.runs.compare",
    "push_artifacts": "tandem.runs.uploads",
    "list_artifacts": "tandem.runs.artifacts",
    "fetch_artifact": "tandem.runs.artifacts",
    "load_environment": "tandem.env.load",
    "new_environment": "tandem.env.scaffold",
    "list_environments": "tandem.env.catalog",
    "try_environment": "tandem.env.human_player",
    "serve_environment": "tandem.recipes.environment_client",
    "load_spec": "tandem.spec.load",
    "parse_spec": "tandem.spec.load",
    "json_schema": "tandem.spec.load",
    "Listen": "tandem.serve.http.run",
    "Algorithm": "tandem.protocols",
    "Callback": "tandem.protocols",
    "Batch": "tandem.types",
    "Group": "tandem.types",
    "MicroBatch": "tandem.types",
    "OptimizerRule": "tandem.protocols",
    "Environment": "tandem.protocols",
    "Chat": "tandem.protocols",
    "Step": "tandem.protocols",
    "StepTokens": "tandem.protocols",
    "TokenLogprobs": "tandem.types",
    "Totals": "tandem.types",
    "Task": "tandem.types",
    "Outcome": "tandem.types",
    "Sampling": "tandem.types",
    "Trajectory": "tandem.types",
}

__all__ = ["__version__", *_API]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})


if not TYPE_CHECKING:  # otherwise type checkers would accept misspelt names

    def __getattr__(name: str) -> object:
        if name in _API:
            return getattr(import_module(_API[name]), name)
        raise AttributeError(f"module 'tandem' has no attribute '{name}'; it has {', '.join(__all__)}")
