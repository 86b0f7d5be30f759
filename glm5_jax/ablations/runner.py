"""Runs the arms of a study, each once for every seed, and measures what they leave.

A folder WORKDIR/ARM/seed_N holds a run as `train` writes it, and measured.jsonl with
the figures that the study measures on its checkpoints. WORKDIR/searches has what
searches have found. What is done is skipped, and what was stopped resumes.
"""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging

from glm5_jax import command_line, files
from glm5_jax import config as config_lib
from glm5_jax.ablations import measures, results, searches
from glm5_jax.ablations import study as study_lib
from glm5_jax.checkpoint import step_folder
from glm5_jax.processes import interrupts

FOUND = "found.json"  # fields that a search has found
_POLL_SECONDS = 0.2
_LAST_LINES = 15  # of the log of a child that failed


class Job(NamedTuple):
    """One run of a study."""

    arm: str
    seed: int
    folder: pathlib.Path
    config: config_lib.TrainConfig
    is_trained: bool = True

    @property
    def name(self) -> str:
        """Returns the folder's path in the study's, by which a child is told."""
        return "/".join(self.folder.parts[-2:])

    @property
    def is_done(self) -> bool:
        """Tells whether the run is over and measured."""
        if not (self.folder / results.MEASURED).is_file():
            return False
        if not self.is_trained:
            return True
        summary = self.summary
        return bool(summary) and self.config.is_over(summary["steps"], summary)

    @property
    def summary(self) -> dict[str, Any]:
        """Returns what the run's summary.json holds; empty before the run has ended."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs of a study, in a folder."""

    study: study_lib.Study
    workdir: pathlib.Path
    num_seeds: int
    overrides: Sequence[command_line.Override] = ()

    @property
    def seeds(self) -> range:
        """Seeds of the initial parameters, the order of the data and the sampling."""
        first = self.study.base.seed
        return range(first, first + self.num_seeds)

    def jobs(self) -> list[Job]:
        """Returns the runs whose settings are known, a seed after the other.

        Where learning rates are swept, the later seeds of an arm are known when the
        first seed has been measured with every rate.

        Raises:
          InputError: the config of an arm is wrong.
        """
        found = []
        for seed in self.seeds:
            for arm in self.study.arms:
                found += self._jobs_of(arm, seed)
        return found

    def chosen(self, arm: study_lib.Arm, seed: int) -> Job | None:
        """Returns the run of an arm that counts; None while rates are being swept."""
        if not self._is_swept(arm):
            return self._job(arm, seed)
        swept = [self._job(arm, self.seeds[0], rate) for rate in self.study.rates]
        if not all(job.is_done for job in swept):
            return None
        metric = self.study.metric()
        sign = -1 if metric.better == "higher" else 1
        values = [results.value(results.records(job.folder), metric) for job in swept]
        known = [(sign * v, i) for i, v in enumerate(values) if v is not None]
        if not known:
            raise config_lib.InputError(f"no rate of arm {arm.name!r} ended well.")
        return self._job(arm, seed, self.study.rates[min(known)[1]])

    def _is_swept(self, arm: study_lib.Arm) -> bool:
        return bool(self.study.rates) and not arm.after

    def _jobs_of(self, arm: study_lib.Arm, seed: int) -> Iterator[Job]:
        """Yields the runs of an arm and a seed that are known."""
        if self._is_swept(arm) and seed == self.seeds[0]:
            for rate in self.study.rates:
                yield self._job(arm, seed, rate)
            return
        waits = arm.after and self._before(arm, seed) is None
        if not waits and (job := self.chosen(arm, seed)):
            yield job

    def parents(self, arm: study_lib.Arm, seed: int) -> list[Job]:
        """Returns the runs, one for each rate, from which an arm may begin."""
        if not arm.after:
            return []
        before = self.study.arm(arm.after)
        rates = self.study.rates if self._is_swept(before) else (None,)
        return [self._job(before, seed, rate) for rate in rates]

    def begun(self, arm: study_lib.Arm, seed: int) -> list[pathlib.Path]:
        """Returns the folders that an arm and its search have, if they have begun."""
        folders = [self.workdir / study_lib.slug(arm.name) / f"seed_{seed}"]
        folders += [self.search_folder(arm, seed)] if arm.search else []
        return [folder for folder in folders if folder.exists()]

    def is_ready(self, job: Job) -> bool:
        """Tells whether the arm that a run begins from is done, if there is one."""
        arm = self.study.arm(job.arm)
        if not arm.after:
            return True
        before = self._before(arm, job.seed)
        return before is not None and before.is_done

    def _before(self, arm: study_lib.Arm, seed: int) -> Job | None:
        return self.chosen(self.study.arm(arm.after), seed)

    def _job(self, arm: study_lib.Arm, seed: int, rate: float | None = None) -> Job:
        """Returns the run of an arm, a seed and, where it is swept, a learning rate."""
        changes: dict = {"seed": seed}
        name = study_lib.slug(arm.name)
        if rate is not None:
            optim = self.study.base.optim
            ratio = optim.end_learning_rate / optim.learning_rate
            changes["optim.learning_rate"] = rate
            changes["optim.end_learning_rate"] = rate * ratio
            name += f"_rate_{rate:g}"
        if arm.after and (before := self._before(arm, seed)):
            changes["init_from"] = str(before.folder)
        if arm.is_trained:
            changes |= self.found(arm, seed)
        config = self.study.config(arm, changes, self.overrides)
        folder = self.workdir / name / f"seed_{seed}"
        return Job(arm.name, seed, folder, config, arm.is_trained)

    def found(self, arm: study_lib.Arm, seed: int) -> dict[str, Any]:
        """Returns what the arm's search has found; nothing before it has ended."""
        path = self.search_folder(arm, seed) / FOUND if arm.search else None
        if path is None or not path.is_file():
            return {}
        return json.loads(path.read_text(encoding="utf-8"))

    def search_folder(self, arm: study_lib.Arm, seed: int) -> pathlib.Path:
        """Returns the folder of an arm's search, which other arms may share."""
        assert arm.search is not None
        name = study_lib.slug(f"{arm.after} {arm.search.name}")
        return self.workdir / "searches" / name / f"seed_{seed}"


def check(plan: Plan) -> None:
    """Checks every config and every folder before anything compiles.

    Raises:
      InputError: a config is wrong, an override does not reach all arms, a suite does
        not exist, a folder holds another run, or a run is to go on from whose end
        others have begun.
    """
    from glm5_jax.training.run import folder as run_folder

    plan.study.require_reach(plan.overrides)
    for reader in (plan.study.measure, *(arm.search for arm in plan.study.arms)):
        if isinstance(reader, measures.Suites | searches.Windows):
            reader.require_known()
    for arm in plan.study.arms:
        plan.study.config(arm, {}, plan.overrides)
    for job in plan.jobs():
        if job.is_trained:
            run_folder.require_usable(job.folder, job.config)
    for arm, seed in itertools.product(plan.study.arms, plan.seeds):
        for folder in plan.begun(arm, seed):
            for job in plan.parents(arm, seed):
                _require_same_end(job, folder)


def _require_same_end(job: Job, child: pathlib.Path) -> None:
    """Checks that a run does not go on after others have begun from its end."""
    summary = job.summary
    if summary and not job.config.is_over(summary["steps"], summary):
        raise config_lib.InputError(
            f"arm {job.arm!r}, seed {job.seed}, ended at step {summary['steps']} and "
            f"is now to have {job.config.num_steps}, but {child} began from that end. "
            f"Give another --workdir, or delete what began from it."
        )


def run_all(plan: Plan, parallel: int, command: Sequence[str]) -> None:
    """Runs what is missing: here one after another, or in `parallel` children.

    Args:
      plan: the runs.
      parallel: runs at a time.
      command: program and arguments of a child, without --only.

    Raises:
      InputError: see `check`.
      RuntimeError: a child failed; the message has the end of its log.
    """
    began, num_before = time.perf_counter(), _count(plan)[0]
    while missing := [job for job in plan.jobs() if not job.is_done]:
        if parallel > 1:
            _run_children(plan, missing, parallel, command)
        else:
            run(plan, missing[0])
        num_done, num_all = _count(plan)
        seconds = (time.perf_counter() - began) / max(num_done - num_before, 1)
        logging.info(
            "%d of %d runs are done; about %.0f min are left.",
            num_done,
            num_all,
            (num_all - num_done) * seconds / 60,
        )


def run(plan: Plan, job: Job) -> None:
    """Runs, or resumes, one run after its search, and measures its checkpoints."""
    from glm5_jax.training import loop  # jax: after the input is checked

    logging.info("Arm %s, seed %d, in %s.", job.arm, job.seed, job.folder)
    arm = plan.study.arm(job.arm)
    if arm.search and not plan.found(arm, job.seed):
        _search(plan, arm, job)
        job = only(plan, job.name)  # with what was found
    if arm.is_trained:
        loop.train(job.config, job.folder)
    _measure(plan, job)


def _search(plan: Plan, arm: study_lib.Arm, job: Job) -> None:
    """Writes what an arm's search finds on the parameters that the arm starts from."""
    assert arm.search is not None
    folder = plan.search_folder(arm, job.seed)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = _checkpoints(pathlib.Path(str(job.config.init_from)), ())
    if not checkpoints:
        raise config_lib.InputError(
            f"arm {arm.name!r}, seed {job.seed}, searches on a checkpoint of "
            f"{arm.after!r}, which has none yet; run that arm first."
        )
    found = dict(arm.search(checkpoints[-1], folder / "rounds.json"))
    logging.info("Arm %s, seed %d: the search found %s.", arm.name, job.seed, found)
    files.write_text(folder / FOUND, json.dumps(found, indent=1) + "\n")


def _measure(plan: Plan, job: Job) -> None:
    """Writes the figures of every checkpoint of a run, or of those that it measures."""
    study, arm = plan.study, plan.study.arm(job.arm)
    given, folder = dict(arm.measured_with), job.folder
    if not arm.is_trained:
        given |= plan.found(arm, job.seed)
        folder = pathlib.Path(str(job.config.init_from))
        job.folder.mkdir(parents=True, exist_ok=True)
    overrides = tuple((path, str(value)) for path, value in given.items())
    checkpoints = _checkpoints(folder, overrides)
    lines = []
    for checkpoint in checkpoints if arm.is_trained else checkpoints[-1:]:
        figures = study.measure(checkpoint) if study.measure else {}
        lines.append(json.dumps({"step": checkpoint.step, **figures}))
    files.write_text(job.folder / results.MEASURED, "\n".join([*lines, ""]))


def _checkpoints(
    folder: pathlib.Path, overrides: tuple[command_line.Override, ...]
) -> list[study_lib.Checkpoint]:
    """Returns the checkpoints that a run keeps, the newest last."""
    steps = step_folder.numbers(step_folder.absolute(folder) / "checkpoints")
    return [study_lib.Checkpoint(folder, step, overrides) for step in steps]


def only(plan: Plan, name: str) -> Job:
    """Returns the run of a name.

    Raises:
      InputError: the study has no such run.
    """
    known = {job.name: job for job in plan.jobs()}
    if name not in known:
        raise config_lib.InputError(f"--only={name} is none of {', '.join(known)}.")
    return known[name]


def _count(plan: Plan) -> tuple[int, int]:
    """Returns the runs that are done, and all of them, those to come included."""
    study, jobs = plan.study, plan.jobs()
    num_roots = sum(not arm.after for arm in study.arms)
    num_swept = num_roots * max(len(study.rates) - 1, 0)
    return (
        sum(job.is_done for job in jobs),
        len(study.arms) * plan.num_seeds + num_swept,
    )


def _run_children(
    plan: Plan, missing: Sequence[Job], parallel: int, command: Sequence[str]
) -> None:
    """Runs jobs whose parameters to start from are there, a process each."""
    ready = [job for job in missing if plan.is_ready(job)]
    assert ready  # an arm's parent comes before it, and is known
    running: dict[subprocess.Popen, Job] = {}

    def end_all() -> None:
        for child in running:
            child.terminate()  # saves a checkpoint
        for child in running:
            child.wait()

    with interrupts.undoing(end_all):
        try:
            while ready or running:
                while ready and len(running) < parallel:
                    job = ready.pop(0)
                    running[_start(plan, job, command)] = job
                time.sleep(_POLL_SECONDS)
                for child in [c for c in running if c.poll() is not None]:
                    _require_success(child, plan, running.pop(child))
        finally:
            end_all()


def _start(plan: Plan, job: Job, command: Sequence[str]) -> subprocess.Popen:
    logging.info(
        "Starts arm %s, seed %d; log in %s.", job.arm, job.seed, _log(plan, job)
    )
    _log(plan, job).parent.mkdir(parents=True, exist_ok=True)
    with _log(plan, job).open("wb") as log:
        return subprocess.Popen(
            [*command, f"--only={job.name}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ctrl-C comes to this process alone
        )


def _log(plan: Plan, job: Job) -> pathlib.Path:
    return plan.workdir / "logs" / f"{job.folder.parent.name}_seed_{job.seed}.log"


def _require_success(child: subprocess.Popen, plan: Plan, job: Job) -> None:
    if child.returncode == 0:
        return
    lines = _log(plan, job).read_text(encoding="utf-8", errors="replace").splitlines()
    raise RuntimeError(
        f"arm {job.arm!r}, seed {job.seed}, ended with code {child.returncode}; the "
        f"end of {_log(plan, job)}:\n" + "\n".join(lines[-_LAST_LINES:])
    )
