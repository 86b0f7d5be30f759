"""Runs suites on a model, stores each answer, and resumes where a run was stopped.

    model = subject.load("runs/NAME")
    results = runner.run(model, ["needle"], lengths=[128, 256], num_tasks=50)
    print(report.table(results))

With a folder `out`, answers.jsonl holds the answer to every task as soon as it is
there. A later run with the same checkpoint, suite, length and seed uses it again.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tqdm
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.config import attention, checks
from glm5_jax.evals import catalogue, held_out, record, report

NUM_TASKS = 100
Append = Callable[[int, record.Answer], None]


def run(
    subject: record.Subject,
    names: Sequence[str],
    *,
    lengths: Sequence[int],
    num_tasks: int = NUM_TASKS,
    seed: int = 0,
    out: str | pathlib.Path | None = None,
    source: str | None = None,
    questions: str | None = None,
    on_result: Callable[[report.Result], None] | None = None,
) -> list[report.Result]:
    """Evaluates a model on suites at every length.

    Args:
      subject: the model.
      names: of suites or of groups of them, see `catalogue`.
      lengths: tokens of a task or row; suites without a length are run once.
      num_tasks: tasks, or rows of held-out text, of a suite and length.
      seed: of the tasks.
      out: folder for answers.jsonl, results.jsonl and table.md; None keeps nothing.
      source: text instead of the model's own corpus, see `record.Corpus`.
      questions: file of suite multiple_choice.
      on_result: called with each result as soon as it is there.

    Raises:
      InputError: a suite does not exist or does not fit the model or the length.
    """
    require(names, subject.config, subject.tokenizer is not None, lengths, questions)
    folder = None if out is None else pathlib.Path(out)
    digest = "" if folder is None else subject.digest()
    corpus = subject.corpus
    if source is not None:
        corpus = dataclasses.replace(corpus, source=source)
    results = []
    for suite in catalogue.find(names):
        for length in lengths if suite.has_length else lengths[:1]:
            setting = record.Setting(
                length=length,
                num_tasks=num_tasks,
                seed=seed,
                corpus=corpus,
                questions=questions if "questions" in suite.needs else None,
            )
            answers = _answers(suite, setting, subject, folder, digest)
            results.append(report.summarize(suite, setting, answers))
            if folder is not None:
                report.write(folder, digest, results)
            if on_result is not None:
                on_result(results[-1])
    return results


def require(
    names: Sequence[str],
    config: config_lib.ModelConfig,
    has_tokenizer: bool,
    lengths: Sequence[int],
    questions: str | None = None,
) -> None:
    """Checks, before anything is read or compiled, that suites fit a model.

    Raises:
      InputError: a suite does not exist, the model lacks what it needs, or a length is
        beyond the positions that the model's RoPE was made for.
    """
    has: dict[record.Need, tuple[bool, str]] = {
        "tokenizer": (has_tokenizer, "a tokenizer.json beside the model"),
        "latent": (
            "latent" in config.layer_attention,
            "a layer of type 'latent', which has an indexer",
        ),
        "softmax": (
            bool({*config.layer_attention} - {*attention.RECURRENT}),
            "a layer with a softmax over keys",
        ),
        "mtp": (config.has_mtp, "model.num_nextn_predict_layers=1"),
        "experts": (
            config.first_k_dense_replace < config.num_hidden_layers,
            "a layer with experts",
        ),
        "questions": (questions is not None, "--questions=FILE.jsonl"),
    }
    chosen = catalogue.find(names)
    errors = [
        f"Suite {suite.name} needs {has[need][1]}."
        for suite in chosen
        for need in sorted(suite.needs)
        if not has[need][0]
    ]
    limit = config.max_position_embeddings
    if not lengths:
        errors.append("Give at least one length in --suite_lengths.")
    errors += [
        f"A length must lie in 2..{limit} (model.max_position_embeddings, the range of "
        f"its RoPE), got {length}; choose a smaller one, or extend the model by a "
        f"stage at that length."
        for length in lengths
        if not 2 <= length <= limit
    ]
    if not errors:
        checks.require(
            *(
                rule
                for suite in chosen
                for length in lengths
                for rule in suite.rules(config, length)
            )
        )
    checks.require(*((False, error) for error in errors))


def _answers(
    suite: record.Suite,
    setting: record.Setting,
    subject: record.Subject,
    folder: pathlib.Path | None,
    digest: str,
) -> list[record.Answer]:
    """Returns the answer to every task, stored or given now, in the tasks' order."""
    tasks = suite.tasks(setting, subject)
    key = "" if folder is None else _key(suite, setting, digest)
    with contextlib.ExitStack() as stack:
        done: dict[int, record.Answer] = {}
        append: Append | None = None
        if folder is not None:
            done = {i: a for i, a in _stored(folder, key) if i < len(tasks)}
            append = stack.enter_context(_appending(folder, key))
        todo = [(i, task) for i, task in enumerate(tasks) if i not in done]
        length = f" {setting.length}" if suite.has_length else ""
        if done:
            logging.info("%s%s: %d answers are stored.", suite.name, length, len(done))
        bar = stack.enter_context(
            tqdm.tqdm(
                desc=f"{suite.name}{length}",
                total=len(tasks),
                initial=len(done),
                leave=False,
                disable=not sys.stderr.isatty(),
            )
        )
        for i, answer in suite.answer(subject, setting, todo):
            done[i] = answer
            if append is not None:
                append(i, answer)
            bar.update()
    return [done[i] for i in range(len(tasks))]


def _key(suite: record.Suite, setting: record.Setting, digest: str) -> str:
    """Returns what answers are stored under; the number of tasks is not in it.

    Questions and held-out text count by their content, which may change in its place.
    Of a task of several rows their number counts, which a short evaluation may lower.
    """
    content = pathlib.Path(setting.questions).read_bytes() if setting.questions else b""
    corpus = dataclasses.astuple(setting.corpus)
    parts = [digest, suite.name, setting.length, setting.seed, *corpus]
    if suite.rows_per_task:
        parts.append(held_out.digest(setting.corpus))
    if setting.num_tasks < suite.rows_per_task:
        parts.append(setting.num_tasks)
    return hashlib.sha256(json.dumps(parts).encode() + content).hexdigest()[:16]


def _stored(folder: pathlib.Path, key: str) -> Iterator[tuple[int, record.Answer]]:
    """Yields stored answers; a line that a killed run left unfinished is skipped."""
    path = folder / "answers.jsonl"
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry: dict[str, Any] = json.loads(line)
            if entry["key"] == key:
                figures = {k: (v[0], v[1]) for k, v in entry["figures"].items()}
                yield entry["task"], record.Answer(figures, entry["text"])
        except (ValueError, KeyError, TypeError, IndexError):
            logging.warning("%s has a line that is no answer; it is skipped.", path)


@contextlib.contextmanager
def _appending(folder: pathlib.Path, key: str) -> Iterator[Append]:
    """Returns a function that stores an answer.

    Raises:
      InputError: the folder cannot be written.
    """
    path = folder / "answers.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("a+", encoding="utf-8"))
            if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                file.write("\n")  # ends the line of a killed run

            def append(task: int, answer: record.Answer) -> None:
                figures = {
                    name: [_plain(x) for x in pair]
                    for name, pair in answer.figures.items()
                }
                line = {"key": key, "task": task, "figures": figures}
                file.write(json.dumps({**line, "text": answer.text}) + "\n")
                file.flush()

            yield append
            os.fsync(file.fileno())
    except OSError as error:
        raise config_lib.InputError(
            f"Answers cannot be stored in {folder}: {error}. Give another folder in "
            f"--out."
        ) from error


def _plain(value: float) -> float:
    """Returns a figure as JSON holds it.

    Raises:
      InputError: it is not finite.
    """
    number = float(value)
    if not math.isfinite(number):
        raise config_lib.InputError(
            "A figure of the model's answers is not finite: its training has diverged. "
            "Give the checkpoint of an earlier step."
        )
    return number
