"""The RL recipe: evaluate, warm up, evaluate, train, evaluate, and give the verdict."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tandem.build import built_model, engaged, groups, run_engines, training
from tandem.build.judges import judge_model
from tandem.build.reference import served_teacher, set_reference
from tandem.env.mix import mean_by_part
from tandem.env.protocol_check import report_of
from tandem.env.scripted_chat import calls_tools, offered_tools
from tandem.errors import NothingLearned, StoreError
from tandem.io.image_store import IMAGES, ImageStore
from tandem.io.kept_samples import KeptSamples
from tandem.loop import run_loop
from tandem.obs.claims import answers
from tandem.obs.run_history import read_history
from tandem.obs.sync_status import ASKED_BY, TOLD
from tandem.ops.option_report import AUTO
from tandem.protocols import Algorithm, Environment, Trainer
from tandem.recipes.supervised_steps import checked_rows, due, recorded_stage, recordings_of, say_if_too_few
from tandem.rollout.deadlines import why_not
from tandem.rollout.episode import Setting
from tandem.rollout.evaluate import Evaluation, evaluate, held_out
from tandem.rollout.no_reward import RewardWatch
from tandem.rollout.reward_reasons import NoReward, likely_reason
from tandem.runs.checkpointer import RunCheckpointer
from tandem.runs.eval_files import StoredEval, played_as, store_eval
from tandem.runs.run import Run
from tandem.runs.verdict import judge
from tandem.spec.algorithm import DistillSpec
from tandem.spec.data import Demonstrations
from tandem.spec.engine import HfEngineSpec
from tandem.spec.environment import MIX, EnvironmentSpec
from tandem.spec.rollouts import AtroposRollouts
from tandem.spec.run import RlSpec
from tandem.spec.train import WarmupStage
from tandem.types import Batch, Group, Metrics, Sampling, Task

_log = logging.getLogger(__name__)

_SAMPLES_KEPT = 8
_CANARY_TASKS = 4
_SHOWN_PART = 5  # without held-out tasks, the first and the last fifth of the steps are reported


def training_reward(run_dir: Path) -> dict[str, Any]:
    """Return the mean training reward of the first and the last fifth of the steps; for runs without an environment."""
    rewards = [row["reward/mean"] for row in read_history(run_dir).rows if "reward/mean" in row]
    count = max(1, len(rewards) // _SHOWN_PART)
    if not rewards:
        return {}
    first, last = statistics.fmean(rewards[:count]), statistics.fmean(rewards[-count:])
    return {"training_reward_first": first, "training_reward_last": last, "training_reward_steps": count}


class RlRun:
    """One RL run: the model, engine, publisher and environment that its stages share."""

    def __init__(
        self,
        spec: RlSpec,
        run: Run,
        environment: Environment | None,
        checkpointer: RunCheckpointer,
        begun: run_engines.BegunEngines,
        crew: Any = None,
    ) -> None:
        """`begun`: the engine processes. `crew`: rank 0's, where several ranks train."""
        self.spec, self.run, self.environment, self.checkpointer = spec, run, environment, checkpointer
        if begun.processes:
            run.note_option("engine begins beside the trainer", AUTO, True, begun.why_imports_only)
        self.model = built_model.run_model(spec, crew, run.directory / IMAGES)
        if not isinstance(spec.engine, HfEngineSpec):
            run.view.doing(f"starting the engine ({spec.engine.kind}); a first start compiles, which takes minutes")
        self.joined = run_engines.join(spec, self.model, run.directory / "engines", crew=crew, begun=begun)
        self.call = training.caller(spec.deterministic and isinstance(spec.engine, HfEngineSpec))
        self.eval_tasks = held_out(environment.tasks("eval"), spec.eval.tasks, spec.seed) if environment else []
        self.publisher = run_engines.publisher(
            self.joined, self.model, spec.sync.deadline_s, self.call, run.synced, self.attached,
            [task.messages for task in self.eval_tasks[:_CANARY_TASKS]],
        )  # fmt: skip
        self._noted = set[str]()
        self.setting = None if environment is None else self._setting(environment, training.its_spec(spec))
        if environment is not None:
            if report := report_of(environment):
                run.event("data", report=report)
                run.view.say("   data: " + report)
            say_if_too_few(run, len(self.eval_tasks), spec.eval.confidence, "raise eval.tasks, or give it more tasks")

    def _setting(self, environment: Environment, environment_spec: EnvironmentSpec) -> Setting:
        """Return what every episode of the run needs: engine, renderer, sampling, deadlines and judge."""
        spec = self.spec
        return Setting(
            environment,
            self.joined.engine,
            self.model.renderer,
            Sampling(max_tokens=spec.train.max_tokens, temperature=spec.train.temperature, top_p=spec.train.top_p),
            self.model.context,
            spec.engine.deadline_s,
            environment_spec.episode_timeout_s,
            spec.train.thinking_length_penalty,
            judge_model(environment_spec.judge, self.joined.engine, self.model.renderer, self.model.context),
            retries=1 if environment_spec.workers else 0,
            images=None if self.model.renderer.images is None else ImageStore(self.run.directory / IMAGES),
        )

    async def train(self) -> None:
        """Run all stages, or those that a resumed run has not finished."""
        if self.spec.environment is not None:
            alarm_missing = "" if self.spec.environment.workers else why_not()  # workers can be killed
            asked = AUTO if self.spec.left_out("environment.episode_timeout_s") else "blocking code too"
            self.run.note_option("environment.episode_timeout_s", asked, not alarm_missing, alarm_missing)
            if self.spec.environment.sandbox != "off":
                opened = getattr(self.environment, "sandbox", "")
                self.run.note_option(
                    "environment.sandbox", self.spec.asked("environment.sandbox", AUTO), bool(opened), opened
                )
        for note in engaged.options(self.spec, self.model):
            self.run.note_option(*note)
        self.model.warn(self.run)
        warmup = self.spec.warmup
        self.run.status["steps_total"] = (warmup.steps if warmup else 0) + self.spec.train.steps
        self._teacher = await served_teacher(self.spec.algorithm, self.model)  # before the warm-up: it may be refused
        version = 0
        if warmup is not None:
            version = warmup.steps if self.checkpointer.goes_on_in("rl") else await self._warm_up(warmup)
        algorithm = training.algorithm(self.spec.algorithm, self.spec.train.max_tokens)
        if algorithm.needs_reference:
            self._reference(version)
        trainer = training.trainer(self.spec.train, self.model, algorithm, version, self.spec.seed)
        self.checkpointer.load(trainer, "rl")
        if self.setting is None:
            await self._rl_stage(trainer, algorithm)
            self.run.conclude("undecided", training_reward(self.run.directory))
            return
        before = await self._evaluate(trainer, "before_rl", "before RL")
        await self._rl_stage(trainer, algorithm)
        after = await self._evaluate(trainer, "after", "after RL")
        verdict = judge(
            before.scores,
            after.scores,
            confidence=self.spec.eval.confidence,
            measure=after.measure,
            seed=self.spec.seed,
        )
        results = {
            "metric": after.measure,
            "after_minus_before_rl": verdict.difference,
            "failed_episodes_before_rl": before.failed,
            "failed_episodes_after": after.failed,
        }
        self.run.conclude(verdict.verdict, results | verdict.evaluation())

    def _reference(self, version: int) -> None:
        """Set the reference to the weights that RL began with. A resumed run loads them from its checkpoint."""
        saved = self.checkpointer.reference()
        if saved is not None and self.checkpointer.goes_on_in("rl"):
            training.load_weights(self.model, saved)
        elif version and not isinstance(self.spec.algorithm, DistillSpec):  # a teacher's weights need no copy
            self.checkpointer.keep_reference(version, training.weights_writer(self.model))
        set_reference(self.spec.algorithm, self.model, self.spec.precision)

    def attached(self, attachment: Mapping[str, Any]) -> None:
        """Record what the engines reported when the bridge attached them; note each of their options once."""
        self.run.attached(attachment)
        for part, name in TOLD.items():
            option = next((engine[part] for engine in attachment["engines"] if engine.get(part)), None)
            if option is not None and part not in self._noted:
                self._noted.add(part)
                note = option["why_not"] or option.get("note", "")
                setting = f"engine.{ASKED_BY[part]}" if part in ASKED_BY else ""
                requested = option["requested"] if setting and self.spec.asked(setting, AUTO) != AUTO else AUTO
                self.run.note_option(name, requested, option["engaged"], note)

    async def close(self) -> None:
        """End the environment's workers, the engine and the bridge."""
        training.close(self.environment)
        await self.joined.engine.close()
        self.joined.bridge.close()

    async def _warm_up(self, stage: WarmupStage) -> int:
        """Run the supervised stage and return its last version."""
        algorithm = training.sft_algorithm()
        trainer = training.trainer(stage, self.model, algorithm, 0, self.spec.seed)
        self.checkpointer.load(trainer, "warmup")
        if self.setting is not None:
            await self._evaluate(trainer, "before", "before training")
        recorded = await self._recordings(stage)
        self.run.stage("warmup", stage.steps, f"{len(recorded)} demonstrations")
        await self.publisher.rest(trainer)  # the engine is idle until the next version is published
        await recorded_stage(
            self.run, self.model, trainer, stage, recorded, algorithm, seed=self.spec.seed,
            deterministic=self.spec.deterministic, checkpointer=self.checkpointer,
        )  # fmt: skip
        return trainer.version

    async def _recordings(self, stage: WarmupStage) -> list[Group]:
        if not isinstance(stage.data, Demonstrations):
            train, held_out = checked_rows(self.model, stage.data, self.run, "warmup.data")
            return train + held_out  # no rows are held out, because the environment judges the warm-up
        count = stage.steps * stage.batch_size
        assert self.environment is not None, "RlSpec refuses demonstrations without an environment"
        shown = groups.demonstrations(self.environment, training.its_spec(self.spec).name, count, self.spec.seed)
        tools = [[]] * len(shown)
        if any(calls_tools(messages) for _, messages in shown):
            limit_s = training.its_spec(self.spec).episode_timeout_s
            tools = [await offered_tools(self.environment, task, limit_s) for task, _ in shown]
        return [[each] for each in recordings_of(self.model, shown, tools, self.setting and self.setting.images)]

    async def _rl_stage(self, trainer: Trainer, algorithm: Algorithm) -> None:
        """Run the loop over the RL steps. `first`, `last`: versions before the first step and after the last."""
        spec, stage = self.spec, self.spec.train
        training.show_life(trainer, self.run.progress.tick, self.run.note_option)
        first = spec.warmup.steps if spec.warmup else 0
        watch = RewardWatch(
            self._no_reward,
            algorithm.keep,
            enough=stage.groups_per_step * stage.group_size,
            max_tokens=stage.max_tokens,
            begins=trainer.version == first,
        )
        store, producer = groups.rollouts(spec, self.run.directory, self.setting, algorithm, self.model, trainer, watch)

        async def after_step(metrics: Metrics) -> None:
            metrics["time/tokens_per_s"] = metrics.get("tokens/sampled", 0.0) / metrics["time/step_s"]
            if due(spec.eval.every, trainer.version - first, stage.steps):
                name = f"step {trainer.version}"
                found = await self._play_held_out(trainer.version, name)
                metrics[f"eval/{found.measure}"] = found.mean
                self._tell(found, name, name)
            if self.run.kept is not None and not metrics.get("train/set_aside"):
                self.run.kept.keep(trainer.version, latest)
            self.run.record(trainer.version, metrics)

        self._keep_samples(trainer.version)
        last = first + stage.steps
        self.run.stage(
            "rl", stage.steps, f"{stage.groups_per_step} x {stage.group_size} samples a step, {algorithm.name}"
        )
        seen = self.run.callbacks.seen if self.run.callbacks else None
        make, latest = training.batches(stage, self.model, algorithm, seen), list[Group]()

        def make_batch(groups: list[Group], version: int) -> Batch:
            latest[:] = groups
            if self.setting is None:  # another process plays them
                for group in groups:
                    watch.played(Task(group[0].task_id, ()), group)
            return make(groups, version)

        try:
            await run_loop(
                trainer=trainer,
                publisher=self.publisher,
                store=store,
                producers=[producer],
                make_batch=make_batch,
                groups_per_step=stage.groups_per_step,
                last_version=last,
                after_step=after_step,
                sync_every=spec.sync.every,
                call=self.call,
                checkpointer=self.checkpointer,
                look_over=self._teacher.score if self._teacher else None,
                max_lag=math.inf if isinstance(spec.rollouts, AtroposRollouts) else stage.max_lag,
            )
            trainer.finish()
        except NothingLearned as error:
            reason = f"\n{watch.reason()}" if watch.reason() else ""
            raise NothingLearned(
                f"{error}{reason}\nanswers of the last batch, with their rewards:\n"
                f"{answers([*chain.from_iterable(latest)])}"
            ) from None
        finally:
            await groups.leave(store)

    def _no_reward(self, found: NoReward, text: str) -> None:
        """Report that the first answers earned nothing, and the likely reason."""
        self.run.event("no_reward", reason=found.kind, message=text)
        self.run.view.say(f"   {text}")
        _log.warning("%s", text)

    def _keep_samples(self, version: int) -> None:
        """Open the store of training samples. A run goes on without one that cannot be opened."""
        spec = self.spec.samples
        if not spec.share:
            return
        try:
            self.run.kept = KeptSamples(
                self.run.directory,
                after_step=version,
                share=spec.share,
                max_bytes=int(spec.max_gib * 2**30),
                decode=self.model.renderer.decode,
                spell=partial(self.model.renderer.decode, skip_special=False),
                tell=self.run.warn,
            )
        except (StoreError, OSError) as error:
            self.run.warn(f"samples: none are kept: {error}")
            return
        which = "all" if spec.share == 1 else f"{100 * spec.share:g} % of"
        self.run.event("samples", share=spec.share, max_gib=spec.max_gib)
        self.run.view.say(f"   keeps {which} training samples, in at most {spec.max_gib:g} GiB: `tandem samples RUN`")

    async def _evaluate(self, trainer: Trainer, name: str, label: str) -> Evaluation:
        """Play the held-out tasks with the served version, unless the checkpoint already has this evaluation."""
        await self.publisher.ensure_served(trainer)
        if (known := self.checkpointer.remembered(name)) is not None:
            return Evaluation(known["scores"], [], known["failed"], known.get("measure", "accuracy"))
        result = await self._play_held_out(trainer.version, name)
        self.checkpointer.remember(name, {"scores": result.scores, "failed": result.failed, "measure": result.measure})
        self._tell(result, name, label)
        return result

    def _tell(self, found: Evaluation, name: str, label: str) -> None:
        """Report the mean, and example answers if all score the same; not for `before`, which a warm-up may follow."""
        self.run.evaluated(name, label, found.mean, metric=found.measure)
        if training.its_spec(self.spec).name == MIX:
            means = mean_by_part([task.id for task in self.eval_tasks], found.scores)
            self.run.event("evaluation by environment", name=name, means=means)
            self.run.view.say("   of which " + ", ".join(f"{part} {mean:.4g}" for part, mean in means.items()))
        if name != "before" and found.all_equal:
            self.run.view.say(f"   {found.all_equal}")
            tasks = {task.id: task for task in self.eval_tasks}
            played = [(tasks[each.task_id], each) for each in found.played if each.task_id in tasks]
            why = likely_reason(played, max_tokens=self.spec.eval.max_tokens or self.spec.train.max_tokens)
            if why is not None and why.kind != "difficulty":  # which is said of siblings only, since they tell more
                self.run.view.say(f"   likely {why.kind}: {why.text}")

    async def _play_held_out(self, version: int, name: str) -> Evaluation:
        self.run.view.doing(f"evaluating on {len(self.eval_tasks)} held-out tasks")
        max_tokens = self.spec.eval.max_tokens or self.spec.train.max_tokens
        assert self.setting is not None, "RlSpec refuses evaluations without an environment"
        share = training.its_spec(self.spec).max_failed_share
        measure = self.run.status["eval"].get("metric")  # from an earlier evaluation, perhaps of another process
        found = await evaluate(self.setting, self.eval_tasks, max_tokens, max_failed_share=share, measure=measure)
        tasks = [task.id for task in self.eval_tasks]
        stored = StoredEval(version, name, found.measure, played_as(self.spec), tasks, found.scores, found.failed)
        store_eval(self.run.directory, stored)
        for trajectory in found.played[:_SAMPLES_KEPT]:
            self.run.sample(name, version, trajectory.task_id, trajectory.messages, trajectory.reward)
        return found
