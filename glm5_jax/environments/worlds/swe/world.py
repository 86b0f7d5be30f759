"""The world of software engineering: mend a package so that hidden tests pass.

The agent works on its own copy of a package without tests. At the end its files are
written over a fresh copy, tests and files that steer them are put back, and the tests
run there. The reward is 1 if all of FAIL_TO_PASS and PASS_TO_PASS pass, else 0.
"""

import functools
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import listed, proofs, protocol, sandbox, tool_calls
from glm5_jax.environments.worlds.swe import (
    attempts,
    copies,
    drivers,
    exported,
    kinds,
    recipes,
    records,
    statements,
    tools,
    trials,
)

PREFIX = "swe:"
MAX_TURNS = 60
HELD_OUT = 8  # one task in so many
_MAX_READ = 2**25  # bytes of files that an agent changed
_MAX_FILES = 2000  # that an agent changed
_MAX_NAME, _MAX_PATH = 255, 1000  # bytes; what is longer is in no package
_INSTRUCTION = (
    "The package is in {home}; its tests are not. Change its source with the tools, "
    "then call submit. Hidden tests decide. Edits of tests do not count.\n\n"
)
_SETUP = "Before the tests, these commands run there:\n\n{setup}\n\n"


class Swe(listed.Listed[records.Record]):
    """The tasks of a folder that was mined."""

    def __init__(self, name: str) -> None:
        """Reads the tasks of "swe:FOLDER".

        Raises:
            config.InputError: the folder has no tasks.
        """
        self.folder = records.Folder(name.removeprefix(PREFIX))
        by_id = {one.instance_id: one for one in self.folder.records()}
        kept = self.folder.path / listed.PROOFS
        super().__init__(name, by_id, HELD_OUT, "mine more", proofs=kept)

    def task_of(self, record: records.Record) -> protocol.Task:
        """Returns the task of a record."""
        text = _INSTRUCTION.format(home=tools.HOME)
        if record.recipe.setup:
            text += _SETUP.format(setup=record.recipe.setup)
        text += record.problem_statement
        return protocol.Task(
            id=record.instance_id,
            messages=({"role": "user", "content": text},),
            answer=record.instance_id,
            tools=tools.SCHEMAS,
            tag=record.recipe.language,
        )

    def source_of(self, task: protocol.Task) -> str:
        """Returns the package of a task in its registry."""
        return self.by_id[task.answer].source.partition(" sha256:")[0]

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the solution, and cheats."""
        record = self.by_id[task.answer]
        wrong = attempts.wrong(self.folder, record)
        return proofs.Attempts(attempts.right(self.folder, record), wrong)

    def scored_by(self, task: protocol.Task) -> str:
        """Returns what decides about a task."""
        return scored_by(self.folder, self.by_id[task.answer])

    async def leaks(
        self, environment: protocol.Environment, task: protocol.Task
    ) -> Sequence[str]:
        """Returns what of the solution and the tests an agent could read."""
        record = self.by_id[task.answer]
        told = statements.leaks(record.problem_statement, record)
        secret = copies.secrets(self.folder, record).items()
        assert isinstance(environment, Environment)
        return [*told, *await environment.search(attempts.look(secret))]

    def export(self, task: protocol.Task, folder: pathlib.Path) -> None:
        """Writes a task in Harbor's format.

        Raises:
            config.InputError: a folder cannot hide its solution.
        """
        exported.write(self.folder, self.by_id[task.answer], folder)

    def environment(self) -> "Environment":
        """Returns an environment for one episode."""
        return Environment(self)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the task's messages and the solution as calls."""
        return [*task.messages, *attempts.right(self.folder, self.by_id[task.answer])]


class Environment:
    """An episode in a sandbox of its own."""

    def __init__(self, world: Swe, max_turns: int = MAX_TURNS) -> None:
        """Makes an environment that cuts off an episode after `max_turns` turns."""
        self._world, self._max_turns = world, max_turns
        self._box: Any = None
        self._record: records.Record | None = None
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Opens the sandbox and returns the task's messages."""
        self._record, self._num_turns = self._world.by_id[task.answer], 0
        self._box = await open_box(self._world.folder, (self._record,))
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Returns the results of the turn's calls, or the reward at the end."""
        self._num_turns += 1
        run = functools.partial(tools.run, self._box)
        results, is_over = await tool_calls.answer(message, tools.SCHEMAS, run)
        is_over |= not message.get("tool_calls")
        if is_over or self._num_turns >= self._max_turns:
            return await self._score(is_cut=not is_over)
        return protocol.StepResult(results, None, False, False)

    async def search(self, command: str) -> list[str]:
        """Returns the lines of a command in the agent's sandbox; it is no turn."""
        return await tools.search(self._box, command)

    async def close(self) -> None:
        """Removes the sandbox."""
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()

    async def _score(self, *, is_cut: bool) -> protocol.StepResult:
        record = self._record
        assert record is not None  # reset was called
        known = self._world.folder.agent_tree(record)
        files = await read_tree(self._box, known)
        reward, problem = await score(self._world.folder, record, files)
        info = {"problem": problem} if problem else {}
        return protocol.StepResult((), reward, not is_cut, is_cut, info)


def scored_by(folder: records.Folder, record: records.Record) -> str:
    """Returns what decides about a task: its record, all files, runner's edition."""
    files = {**folder.agent_tree(record), **folder.hidden_tree(record)}
    return repr((record, sorted(files.items()), drivers.edition()))


async def score(
    folder: records.Folder, record: records.Record, files: records.Files
) -> tuple[protocol.Reward, str]:
    """Returns the reward of an agent's files, and what was wrong with the run.

    Args:
        folder: of the task.
        record: the task.
        files: of the package as the agent left them.
    """
    recipe = record.recipe
    given = folder.agent_tree(record)
    taken = {p: c for p, c in files.items() if recipes.is_taken(p, recipe, given)}
    kept = {p: c for p, c in given.items() if recipes.is_guarded(p, recipe)}
    fixed = {**kept, **folder.hidden_tree(record)}
    trial = await trials.run(kinds.merged(taken, fixed), recipe)
    passed = trial.passed()
    shares = {
        "fail_to_pass": _share(record.FAIL_TO_PASS, passed),
        "pass_to_pass": _share(record.PASS_TO_PASS, passed),
    }
    total = float(all(share == 1.0 for share in shares.values()))
    return protocol.Reward(total, {"solved": total, **shares}), trial.problem


async def open_box(
    folder: records.Folder, tasks: Sequence[records.Record]
) -> sandbox.Box:
    """Starts the sandbox of an agent, in the folder of its package.

    Args:
        folder: of the tasks.
        tasks: the agent starts with the files of the first one; copies of what solves
            or tests any of them are hidden.

    Raises:
        config.InputError: the machine's sandbox has no folder /work.
    """
    sandbox.require_work()
    recipe = tasks[0].recipe
    files = folder.agent_tree(tasks[0])
    binds = drivers.binds(recipe)
    roots = (copies.USR, *binds)
    found = {
        path
        for task in tasks
        for path in copies.on_host(copies.secrets(folder, task), roots)
    }
    image = sandbox.Image(
        files={f"{drivers.ROOT}/{path}": text for path, text in files.items()},
        binds=binds,
        hidden=copies.outermost(found),
    )
    box = await sandbox.start(image, trials.limits(recipe))
    await box.run(f"cd {tools.HOME}")
    return box


async def read_tree(box: Any, known: records.Files) -> records.Files:
    """Returns the regular files below the package's folder, in a new shell of the box.

    None are found where listing them takes too long, and too many count in part.

    Args:
        box: the agent's.
        known: files that need not be read if their digests are the same.
    """
    await box.restart()  # no process of the agent makes files or answers meanwhile
    command = f"cd {tools.HOME} && /usr/bin/find . -type f -size -1024k -print0"
    found = await box.run(f"{command} | /usr/bin/xargs -0 -r /usr/bin/sha256sum")
    if found.exit_code is None or found.is_cut:
        return {}
    digests = {hashlib.sha256(text).hexdigest(): text for text in known.values()}
    files, num_bytes, most = {}, 0, len(digests) + _MAX_FILES
    for line in found.stdout.split("\n"):
        digest, _, path = line.partition("  ./")
        # No name, one with a line feed, or one that the next sandbox may not take.
        if not path or digest.startswith("\\") or _is_long(path):
            continue
        if digest not in digests:
            try:
                digests[digest] = await box.read(f"{tools.HOME}/{path}")
            except sandbox.FileError:  # without a sandbox, processes may remain
                continue
            num_bytes += len(digests[digest])
        if num_bytes > _MAX_READ or len(digests) > most:
            break
        files[path] = digests[digest]
    return files


def _is_long(path: str) -> bool:
    names = map(len, path.encode().split(b"/"))
    return max(names) > _MAX_NAME or len(path.encode()) > _MAX_PATH


def _share(tests: Sequence[str], passed: set[str]) -> float:
    return sum(test in passed for test in tests) / len(tests) if tests else 1.0
