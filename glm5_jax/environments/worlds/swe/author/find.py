"""Asks a model how a package's tests run, and tries what it says as a rule's recipe.

Only a recipe under which the tests pass twice is kept, by the same measure as a rule's
(mine.py); its canary must pass with one value and fail with another. Everything that
was asked is a line of FOLDER/asked.jsonl.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import endpoint
from glm5_jax.environments.worlds.swe import (
    drivers,
    mine,
    parsers,
    records,
    sources,
    trials,
)
from glm5_jax.environments.worlds.swe.author import answers

LOG = "asked.jsonl"
_MOST_READINGS = 3  # of a package, beside its recipes
_WEAK = "its canary does not pass where it must"


class Author:
    """A model that finds recipes for the packages of a folder."""

    def __init__(
        self, ask: endpoint.Ask, folder: records.Folder, num_refinements: int = 3
    ) -> None:
        """Opens the log of a folder.

        Args:
            ask: the model.
            folder: of the tasks.
            num_refinements: how often a recipe that does not work may be mended.

        Raises:
            config.InputError: num_refinements is negative.
        """
        if num_refinements < 0:
            raise config.InputError(
                f"--num_refinements must not be negative, got {num_refinements}."
            )
        self._ask, self._num_recipes = ask, 1 + num_refinements
        self._path = folder.path / LOG

    def has_asked(self, package: sources.Package) -> bool:
        """Returns whether the model was asked for a package before."""
        return package.tree in asked(self._path.parent)

    async def find(
        self, package: sources.Package, failed: mine.Failed, max_seconds: float
    ) -> mine.Found | mine.Failed:
        """Returns a recipe of the model that works, or what came of its last one.

        A package is asked for once; what worked is tried again.

        Args:
            package: to test.
            failed: what came of the rules.
            max_seconds: of CPU; slower tests count as none.

        Raises:
            config.InputError: the endpoint does not answer, or refuses the first
                request.
        """
        if entry := asked(self._path.parent).get(package.tree):
            if not entry["works"]:
                return failed
            return await _attempt(
                package, records.recipe_of(entry["recipe"]), max_seconds
            )
        told = package.name, package.files, failed.reason, failed.log
        history = answers.first(*told)
        reasons: list[str] = []
        last: mine.Found | mine.Failed = failed
        num_requests = num_readings = 0
        while len(reasons) < self._num_recipes:
            try:
                said = (await self._ask(history, ()))["content"]
            except endpoint.RefusedError as error:  # such as what is too long
                if not num_requests:
                    raise
                reasons.append(f"the endpoint refuses: {error}")
                break
            num_requests += 1
            result = await self._answer(said, package, max_seconds)
            if isinstance(result, str):
                num_readings += 1
                follows = result
                if num_readings > _MOST_READINGS:
                    follows = "No more can be read. Answer with a recipe."
                    reasons.append("it wants to read without an end")
            elif isinstance(result, mine.Found):
                last = result
                break
            else:
                last = result
                reasons.append(result.reason)
                follows = answers.again(result.reason, result.log)["content"]
            turn: messages.Message = {"role": "assistant", "content": said}
            history = [*history, turn, {"role": "user", "content": follows}]
        self._write(package, failed, last, reasons, num_requests)
        return last

    async def _answer(
        self, said: str, package: sources.Package, max_seconds: float
    ) -> mine.Found | mine.Failed | str:
        """Returns what comes of a recipe, or the files that the answer wants."""
        try:
            answer = answers.read(said, package.files)
        except ValueError as error:
            return mine.Failed(str(error))
        if answer.recipe is None:
            return answers.shown(package.files, answer.read)
        return await _try(package, answer.recipe, max_seconds)

    def _write(
        self,
        package: sources.Package,
        failed: mine.Failed,
        last: mine.Found | mine.Failed,
        reasons: list[str],
        num_requests: int,
    ) -> None:
        is_found = isinstance(last, mine.Found)
        entry = {
            "package": package.tree,
            "rules": failed.reason,
            "works": is_found,
            "requests": num_requests,
            "failures": reasons,
            "recipe": dataclasses.asdict(last.recipe) if is_found else None,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


async def _try(
    package: sources.Package, recipe: records.Recipe, max_seconds: float
) -> mine.Found | mine.Failed:
    """Returns what comes of a recipe whose canary has a value to fill in."""
    if lacks := drivers.missing(recipe):
        return mine.Failed(lacks)
    if recipe.canary:
        passes = recipe.canary.replace(answers.VALUE, "1")
        control = dataclasses.replace(recipe, canary=passes)
        trial = await trials.run(package.files, control)
        if trial.problem != parsers.NO_FAILURE:
            return mine.Failed(trial.problem or _WEAK, trial.log)
    fails = recipe.canary.replace(answers.VALUE, "2")
    recipe = dataclasses.replace(recipe, canary=fails)
    return await _attempt(package, recipe, max_seconds)


async def _attempt(
    package: sources.Package, recipe: records.Recipe, max_seconds: float
) -> mine.Found | mine.Failed:
    result = await mine.attempt(package, recipe, max_seconds)
    if isinstance(result, mine.Found):
        return dataclasses.replace(result, by=mine.BY_MODEL)
    return result


def asked(folder: pathlib.Path) -> Mapping[str, Mapping[str, Any]]:
    """Returns the lines of a folder's log by package; half a line is none."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {entry["package"]: entry for entry in entries}
