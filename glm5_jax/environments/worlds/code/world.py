"""The world of code: one turn with a function, judged by tests that are never shown."""

import random
from collections.abc import Sequence

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol
from glm5_jax.environments.tasks import problems
from glm5_jax.environments.worlds.code import families, human_eval, judge

_INSTRUCTION = (
    "Complete this Python function. Answer with the whole function in a block of code; "
    "hidden tests decide.\n\n```python\n{head}\n```"
)
# Answers that try to pass without solving anything, for the head's body.
_CHEATS = (
    "    import os\n    os._exit(0)\n",
    "    import sys\n    sys.exit(0)\n",
    "    class Same:\n        __eq__ = lambda *_: True\n"
    "        __ne__ = lambda *_: False\n        __hash__ = None\n    return Same()\n",
    "    import pathlib\n    seen = ''.join(p.read_text(errors='replace') for p in "
    "pathlib.Path('/work').rglob('*') if p.is_file())\n"
    "    assert 'def check' in seen and 0\n",
)


class _Judged:
    """A taskset whose answers are code for a problem."""

    name: str

    def environment(self) -> "Episode":
        """Returns an environment that judges one turn."""
        return Episode()

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the question and the whole function."""
        problem = task.answer
        return (*task.messages, _said(problem.head + problem.solution))

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the solution, near misses, cheats and a function without a body."""
        problem = task.answer
        bodies = (*problem.wrong, "    pass\n", *_CHEATS)
        wrong = tuple((_said(problem.head + body),) for body in bodies)
        return proofs.Attempts([_said(problem.head + problem.solution)], wrong)


class HumanEval(_Judged):
    """HumanEval's tasks, for evaluation alone: "humaneval"."""

    splits = ("held_out",)

    def __init__(self, name: str) -> None:
        """Reads the tasks.

        Raises:
            config.InputError: the extra is missing, or the name has a size.
        """
        if name != human_eval.NAME:
            raise config.InputError(f"{name!r}: {human_eval.NAME} has no parts.")
        self.name = name
        self._problems = human_eval.problems()

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task in the package's order, again from the first after the last.

        Raises:
            config.InputError: the split is not held_out.
        """
        del seed  # the tasks are what they are
        if split not in self.splits:
            raise config.InputError(
                f"{self.name} is for evaluation: it has no tasks in {split}. Train on "
                f"'code'."
            )
        return _task(self._problems[index % len(self._problems)])


class Code(_Judged):
    """Tasks from seeds, of all families in turn or of one: "code", "code:intervals"."""

    def __init__(self, name: str) -> None:
        """Takes the families.

        Raises:
            config.InputError: there is no such family.
        """
        self.name = name
        wanted = name.partition(":")[2]
        if wanted and wanted not in families.ALL:
            raise config.InputError(
                f"{name!r}: there is no family {wanted!r}; there are "
                f"{', '.join(families.ALL)}."
            )
        self.families = [wanted] if wanted else [*families.ALL]

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; a hash of its function decides which split it is in."""
        turn, place = divmod(index, len(self.families))
        family = self.families[place]
        rng = random.Random(f"{split}/{seed}/{family}/{turn}")
        while True:
            problem = families.make(family, rng.randrange(2**31))
            if problems.split_of(problem.head + problem.solution) == split:
                return _task(problem)


class Episode:
    """An episode of one turn."""

    def __init__(self) -> None:
        """Makes an environment without a task."""
        self._problem: judge.Problem | None = None

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Returns the task's messages."""
        self._problem = task.answer
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Judges the code of the turn."""
        assert self._problem is not None
        content = message.get("content")
        text = content if isinstance(content, str) else ""
        solved = float(await judge.passes(self._problem, judge.code_of(text)))
        reward = protocol.Reward(solved, {"correct": solved})
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self) -> None:
        """Does nothing: a sandbox ends with its run."""


def _task(problem: judge.Problem) -> protocol.Task:
    text = _INSTRUCTION.format(head=problem.head.strip("\n"))
    said = {"role": "user", "content": text}
    return protocol.Task(
        problem.id, (said,), problem, problem=problem.id, tag=problem.tag
    )


def _said(code: str) -> messages.Message:
    return {"role": "assistant", "content": f"```python\n{code}\n```"}
