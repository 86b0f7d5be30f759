"""What `python -m glm5_jax.episodes` prints about the kept episodes of a run."""

import collections
import pathlib
import re
from collections.abc import Iterable, Sequence

from glm5_jax import config as config_lib
from glm5_jax import environments, files
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.rl import episode_files, jobs, rescoring
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.training.reporting import transcripts
from glm5_jax.weights import companions

_HEAD = (
    f"{'step':>6} {'batch':>6} {'groups':>7} {'episodes':>9} {'unused':>7} "
    f"{'reward':>8}  labels"
)


def steps_of(
    workdir: pathlib.Path, text: str, folder: str = episode_files.FOLDER
) -> list[int]:
    """Returns the kept steps that "7" or "10-20" names; "" names all.

    In the folder of skipped batches the numbers are their positions.

    Raises:
      InputError: none of them is kept, or the text is no such range.
    """
    if not re.fullmatch(r"(\d+(-\d+)?)?", text):
        raise config_lib.InputError(f"--steps must be N or M-N, got {text!r}.")
    kept = episode_files.numbers(workdir, folder)
    first, _, last = text.partition("-")
    low, high = int(first or 0), int(last or first or 2**31)
    found = [step for step in kept if low <= step <= high]
    if not found:
        has = f"steps {kept[0]} to {kept[-1]}" if kept else "no step"
        raise config_lib.InputError(
            f"{workdir}/{folder} has {has}, so none of --steps={text!r}. A run of "
            f"stage rl or async_rl writes them unless rl.episodes_gib is 0."
        )
    return found


def listed(steps: Iterable[episode_files.Step]) -> list[str]:
    """Returns a table with a line for each step."""
    lines = [_HEAD]
    for kept in steps:
        episodes = once(kept)
        rewards = [e.reward.total for e in episodes if e.reward is not None]
        mean = f"{sum(rewards) / len(rewards):8.3f}" if rewards else f"{'-':>8}"
        labels = collections.Counter(e.label.value for e in episodes)
        words = ", ".join(f"{n} {label}" for label, n in sorted(labels.items()))
        lines.append(
            f"{kept.step:6} {kept.position:6} {len(kept.groups):7} {len(episodes):9} "
            f"{len(kept.unused):7} {mean}  {words}"
        )
    return lines


def rescored(
    config: config_lib.TrainConfig,
    workdir: pathlib.Path,
    steps: Iterable[episode_files.Step],
    environment: str | None = None,
) -> tuple[list[str], dict[str, int]]:
    """Returns a line for each episode that gets another reward or label, and counts.

    Args:
      config: of the run.
      workdir: its folder.
      steps: whose episodes are scored again.
      environment: that scores them; None: rl.environment of the run.

    Raises:
      InputError: the environment is unusable.
    """
    taskset = environments.make(environment or config.rl.environment)
    template = template_of(config, workdir)
    settings = jobs.settings(config.rl)
    lines: list[str] = []
    counts = {"episodes": 0, "same": 0, "differ": 0, "diverged": 0}
    for kept in steps:
        verdicts = rescoring.rescore(
            taskset, template, settings, config.data.sequence_length, once(kept)
        )
        for verdict in verdicts:
            counts["episodes"] += 1
            if verdict.is_same:
                counts["same"] += 1
                continue
            counts["differ" if verdict.now else "diverged"] += 1
            now = _said(verdict.now) if verdict.now else f"diverged: {verdict.reason}"
            task = verdict.before.task.id
            lines.append(f"step {kept.step} {task}: {_said(verdict.before)} -> {now}")
    return lines, counts


def write_page(
    config: config_lib.TrainConfig,
    workdir: pathlib.Path,
    steps: Sequence[episode_files.Step],
    path: pathlib.Path,
) -> str:
    """Writes the HTML of steps into a file; returns what it did."""
    text = transcripts.page(config, tokenizer_of(workdir), steps, workdir.name)
    files.write_text(path, text)
    count = sum(len(once(step)) for step in steps)
    return f"{path}: {count} episodes of {len(steps)} steps, {len(text) / 1e6:.1f} MB"


def tokenizer_of(workdir: pathlib.Path) -> tokenizer_lib.Tokenizer:
    """Returns the tokenizer in a run's folder."""
    return tokenizer_lib.load(workdir / companions.TOKENIZER)


def template_of(
    config: config_lib.TrainConfig, workdir: pathlib.Path
) -> templates.Template:
    """Returns the template of a run, with the tokenizer in its folder."""
    return templates.make_template(config.data, tokenizer_of(workdir))


def once(kept: episode_files.Step) -> list[episodes_lib.Episode]:
    """Returns every episode of a step once, those that no step learnt from last."""
    found = {id(e): e for group in kept.groups for e in group}
    return [*found.values(), *kept.unused]


def _said(episode: episodes_lib.Episode) -> str:
    """Returns label and reward in a few words."""
    if episode.reward is None:
        return f"{episode.label.value} ({episode.reason})"
    parts = "".join(f" {k}={v:g}" for k, v in sorted(episode.reward.parts.items()))
    return f"{_label(episode.label)}{episode.reward.total:g}{parts}"


def _label(label: protocol.Label) -> str:
    return "" if label is protocol.Label.OK else f"{label.value} "
