"""Runs a recipe: prepares its corpora, trains its stages in order, writes the report.

Everything that is finished is kept: run after a kill, the same command resumes in the
corpus or the stage that was under way. WORKDIR holds recipe.json, data/CORPUS,
NUMBER_STAGE (a run folder each), measured/STAGE.json, report.html and report.md.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.data.preparation import prepare
from glm5_jax.processes import folder_lock
from glm5_jax.recipes import measured, record, report
from glm5_jax.training import loop
from glm5_jax.training.reporting import accounting, sources

RECORD = "recipe.json"
SOURCES = "documents"  # folder of the written documents, beside those prepared
_SAME = ("recipe", "seed")  # of a folder, at every start


def run(recipe: record.Recipe, workdir: pathlib.Path, seed: int = 0) -> dict[str, Any]:
    """Runs or resumes a recipe to its end.

    Returns:
      The paths of the report, the claims that hold and those that do not.

    Raises:
      InputError: the folder belongs to another recipe or seed, or a stage refuses.
      SystemExit: 143, after a checkpoint, on SIGTERM or ctrl-C.
    """
    workdir = workdir.expanduser().absolute()
    configs = _configs(recipe, workdir, seed)
    _make_folder(workdir)
    with folder_lock.held(workdir):
        origin = _claim(recipe, workdir, seed)
        corpora = {corpus.name: corpus for corpus in recipe.corpora}
        done, folders = 0.0, recipe.folders(workdir)
        for number, config in enumerate(configs):
            stage = recipe.stages[number]
            logging.info(
                "Stage %d of %d, %s: %.0f%% of the recipe's expected time is done.",
                number + 1,
                len(folders),
                stage.name,
                100 * done / recipe.minutes,
            )
            for name in stage.train.data.mixture:
                _prepare(corpora[name], workdir, seed)
            loop.train(config, folders[number])
            measured.measure(stage.measures, folders[number], seed)
            done += stage.minutes
        return report.write(recipe, workdir, origin)


def plan(recipe: record.Recipe, workdir: pathlib.Path, seed: int = 0) -> str:
    """Returns what `run` would do, a line a stage; writes nothing."""
    workdir = workdir.expanduser().absolute()
    lines = [
        f"Recipe {recipe.name}: {recipe.description}",
        f"Folder {workdir}, seed {seed}; about {recipe.minutes:g} minutes on two "
        f"idle cores.",
        "",
    ]
    for number, config in enumerate(_configs(recipe, workdir, seed), 1):
        length, stage = config.data.sequence_length, recipe.stages[number - 1]
        parameters = accounting.count_parameters(config.model)["total"]
        lines.append(
            f"{number}. {stage.name}: stage {config.stage!r}, {config.num_steps} steps "
            f"of {config.num_rows} rows of {length} tokens, {config.model.attention} "
            f"attention, {parameters:,} parameters, about {stage.minutes:g} minutes"
        )
    return "\n".join(lines)


def _configs(
    recipe: record.Recipe, workdir: pathlib.Path, seed: int
) -> list[config_lib.TrainConfig]:
    """Returns the config of each stage, whose measures fit its model."""
    configs = recipe.configs(workdir, seed)
    for stage, config in zip(recipe.stages, configs, strict=True):
        measured.require(stage.measures, config.model)
    return configs


def _make_folder(workdir: pathlib.Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config_lib.InputError(
            f"cannot write into {workdir}: {error.strerror}; give a --workdir in which "
            f"you may create files."
        ) from error


def _claim(
    recipe: record.Recipe, workdir: pathlib.Path, seed: int
) -> Mapping[str, Any]:
    """Returns recipe.json of the folder, which is written at the first start.

    Raises:
      InputError: it is another recipe's or seed's, or the folder holds other files.
    """
    path = workdir / RECORD
    ours = {"recipe": recipe.name, "seed": seed}
    if path.is_file():
        theirs = json.loads(path.read_text(encoding="utf-8"))
        differing = [
            f"{name}={theirs.get(name)!r} there, {name}={ours[name]!r} here"
            for name in _SAME
            if theirs.get(name) != ours[name]
        ]
        if differing:
            raise config_lib.InputError(
                f"{workdir} belongs to another pipeline: {'; '.join(differing)}. Give "
                f"another --workdir, or the recipe and the seed of this one."
            )
        return theirs
    if any(p.name != folder_lock.NAME for p in workdir.iterdir()):
        raise config_lib.InputError(
            f"{workdir} is not empty and holds no pipeline (no {RECORD}); give another "
            f"--workdir, so that nothing in it is overwritten."
        )
    now = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    content = {**ours, "commit": sources.commit(), "began": now}
    files.write_text(path, json.dumps(content, indent=2) + "\n")
    return content


def _prepare(corpus: record.Corpus, workdir: pathlib.Path, seed: int) -> None:
    """Writes the documents of a corpus, if it makes them, and prepares its rows."""
    target = workdir / record.DATA / corpus.name
    if (target / "index.json").is_file():
        return
    settings = corpus.prepare
    if corpus.documents is not None:
        source = workdir / SOURCES / f"{corpus.name}.jsonl"
        _write_documents(source, corpus.documents(seed))
        settings = dataclasses.replace(settings, source=str(source))
    logging.info("Preparing the corpus %s ...", corpus.name)
    prepare.prepare(settings, target)


def _write_documents(path: pathlib.Path, texts: Iterable[str]) -> None:
    """Writes a JSONL file atomically, unless it exists."""

    def write(new: pathlib.Path) -> None:
        with new.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)

    if not path.exists():
        files.write_atomically(path, write)
