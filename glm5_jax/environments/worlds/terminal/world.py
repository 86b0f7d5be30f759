"""The world of terminal tasks: an agent with a shell, judged by what it leaves."""

import functools
import hashlib
import json
import pathlib
import random
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol, sandbox, tool_calls
from glm5_jax.environments.harbor import folder as harbor
from glm5_jax.environments.worlds.terminal import draft as draft_lib
from glm5_jax.environments.worlds.terminal import families

MAX_TURNS = 30
_SECONDS = 30.0  # of a command
_LIMITS = sandbox.Limits(seconds=_SECONDS, disk_bytes=64 * 2**20)
_HELD_OUT = 5  # one task in so many
_MAX_DRAWS = 1000  # to find a task of the split
# Checks do not read an agent's settings of git, Python or the shell.
_CLEAN = "export HOME=/tmp GIT_CONFIG_NOSYSTEM=1 PYTHONNOUSERSITE=1; "
TOOLS = tool_calls.SHELL


class Terminal:
    """Tasks of all families in turn, or of one: "terminal", "terminal:git_revert"."""

    def __init__(self, name: str) -> None:
        """Takes the families whose programs this machine has.

        Raises:
            config.InputError: there is no such family, or its programs are missing.
        """
        self.name = name
        wanted = name.partition(":")[2]
        known = families.ALL
        if wanted and wanted not in known:
            raise config.InputError(
                f"{name!r}: there is no family {wanted!r}; there are "
                f"{', '.join(sorted(known))}."
            )
        chosen = [wanted] if wanted else sorted(known)
        self.families = [n for n in chosen if not missing(known[n])]
        if not self.families:
            needs = missing(known[chosen[0]])
            raise config.InputError(f"{name!r} needs {needs}, which is not installed.")

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; a hash of what it asks decides which split it is in.

        Raises:
            config.InputError: no task of the family is in the split.
        """
        turn, place = divmod(index, len(self.families))
        family = self.families[place]
        rng = random.Random(f"{split}/{seed}/{family}/{turn}")
        for _ in range(_MAX_DRAWS):
            number = rng.randrange(2**31)
            made = draft(family, number)
            asked = _asked(made)
            if _is_held_out(asked) == (split == "held_out"):
                break
        else:
            raise config.InputError(f"terminal:{family} has no task in {split}.")
        said = {"role": "user", "content": f"You are in /work. {made.instruction}"}
        return protocol.Task(
            id=f"{family}/{number}",
            messages=(said,),
            answer=(family, number),
            tools=TOOLS,
            problem=asked,
            tag=family,
        )

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode()

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the task and the turns that solve it."""
        return (*task.messages, *_turns(draft(*task.answer).solution))

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the solution's turns, and those of wrong ones."""
        made = draft(*task.answer)
        return proofs.Attempts(
            _turns(made.solution), tuple(_turns(text) for text in made.wrong)
        )

    def scored_by(self, task: protocol.Task) -> str:
        """Returns the draft of a task, with its checks."""
        return repr(draft(*task.answer))

    def export(self, task: protocol.Task, folder: pathlib.Path) -> None:
        """Writes a task in Harbor's format."""
        family, number = task.answer
        write(folder, f"{family}_{number}", family, draft(family, number))

    async def leaks(self, environment: "Episode", task: protocol.Task) -> list[str]:
        """Looks for the commands of the checks in the files that an agent can read.

        Raises:
            TimeoutError: the search takes too long.
        """
        made = draft(*task.answer)
        found = []
        for number, expect in enumerate(made.expects, 1):
            if len(expect.command) > len("cat answer.txt"):
                text = expect.command.replace("'", "'\\''")
                command = f"grep -rFl -- '{text}' /work /tmp"
                looked = await environment.box.run(command)
                if looked.is_timeout:
                    raise TimeoutError(f"it took more than {looked.seconds:.0f} s")
                if looked.stdout:
                    found.append(f"check {number}")
        return found


class Episode:
    """An episode in a box of its own."""

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        """Makes an environment that cuts an episode off after so many turns."""
        self._max_turns = max_turns
        self._num_turns = 0
        self._draft: draft_lib.Draft | None = None
        self._box: sandbox.Box | None = None

    @property
    def box(self) -> sandbox.Box:
        """Returns the box of the episode under way."""
        assert self._box is not None
        return self._box

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Starts the box, and lets the task's setup run in it."""
        made = self._draft = draft(*task.answer)
        files = {path: text.encode() for path, text in made.files.items()}
        self._box = await sandbox.start(sandbox.Image(files), _LIMITS)
        if made.setup:
            done = await self._box.run(made.setup)
            if done.exit_code != 0:
                raise RuntimeError(f"the setup failed: {done.stderr.strip()}")
            await self._box.restart()
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Runs the turn's calls; submit, or a turn without calls, ends the episode."""
        self._num_turns += 1
        results, is_over = await tool_calls.answer(message, TOOLS, self._shell)
        is_over |= not message.get("tool_calls")
        if is_over or self._num_turns >= self._max_turns:
            return await self._score(is_cut=not is_over)
        return protocol.StepResult(results, None, False, False)

    async def close(self) -> None:
        """Ends the box."""
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()

    async def _shell(self, name: str, arguments: Mapping[str, str]) -> str:
        del name  # the only tool besides submit
        return (await self.box.run(arguments["command"])).text()

    async def _score(self, *, is_cut: bool) -> protocol.StepResult:
        """Checks what the agent left, in a new shell."""
        assert self._draft is not None
        passed: list[bool] = []
        for expect in self._draft.expects:
            await self.box.restart()
            done = await self.box.run(_CLEAN + expect.command)
            passed.append(
                done.exit_code == 0 and done.stdout.strip() == expect.stdout.strip()
            )
        parts: Mapping[str, Any] = {"checks": sum(passed) / len(passed)}
        reward = protocol.Reward(float(all(passed)), parts)
        return protocol.StepResult((), reward, not is_cut, is_cut)


def write(
    folder: pathlib.Path,
    name: str,
    tag: str,
    made: draft_lib.Draft,
    agent_seconds: float = 900.0,
) -> None:
    """Writes a draft as a task folder of Harbor's format.

    Args:
        folder: to make.
        name: of the task, of letters, digits, - and _.
        tag: kind of the task.
        made: the draft.
        agent_seconds: that a solution may take.
    """
    harbor.write(
        folder,
        name,
        tag,
        instruction=f"You are in /work. {made.instruction}",
        files=made.files,
        setup=made.setup,
        solution=made.solution,
        checks=[(expect.command, expect.stdout) for expect in made.expects],
        wrong=made.wrong,
        agent_seconds=agent_seconds,
    )


@functools.lru_cache(4096)
def draft(family: str, number: int) -> draft_lib.Draft:
    """Returns a family's task of a number."""
    return families.ALL[family].make(random.Random(f"{family}/{number}"))


def missing(family: draft_lib.Family) -> str:
    """Returns the programs that a family lacks on this machine."""
    return ", ".join(p for p in family.needs if not shutil.which(p, path="/usr/bin"))


def _turns(commands: str) -> tuple[messages.Message, ...]:
    return (tool_calls.turn("shell", command=commands), tool_calls.turn("submit"))


def _asked(made: draft_lib.Draft) -> str:
    """Returns the SHA-256 of what an agent is given: seeds may give the same task."""
    given = json.dumps([made.instruction, made.files, made.setup], sort_keys=True)
    return hashlib.sha256(given.encode()).hexdigest()


def _is_held_out(asked: str) -> bool:
    return int(asked, 16) % _HELD_OUT == 0
