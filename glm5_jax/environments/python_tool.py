"""Gives the tasks of a taskset a Python tool that runs in the sandbox: "python:gcd:4".

A turn with calls is answered with what its programs print; each program is a new
process, files stay. The first turn without a call is the answer, which the taskset
scores as it always does.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol, sandbox, tool_calls, wrapped

PREFIX = "python:"
MAX_TURNS = 8
TOOLS = (
    tool_calls.schema(
        "python",
        "Runs a Python program and returns what it prints; there is no network.",
        code="The program.",
    ),
)
_LIMITS = sandbox.Limits(
    seconds=10.0,
    memory_bytes=2**30,
    num_processes=32,
    disk_bytes=2**24,
    output_bytes=8 * 2**10,
)


class PythonTool(wrapped.Wrapped):
    """The tasks of a taskset whose own have no tools."""

    def __init__(self, name: str, make: Callable[[str], protocol.Taskset]) -> None:
        """Makes the taskset that is wrapped.

        Args:
            name: "python:NAME".
            make: returns the taskset of NAME.

        Raises:
            config.InputError: the taskset does not exist, has tools of its own, or
                brings agents of its own.
        """
        super().__init__(name, name.removeprefix(PREFIX), make)
        has_agents = protocol.has_agents(self._inner)
        if has_agents or self._inner.task(self.splits[0], 0, 0).tools:
            raise config.InputError(
                f"rl.environment={name!r}: {self._inner.name} has tools of its own; "
                f"take it without {PREFIX}."
            )

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the taskset's task with the tool."""
        return dataclasses.replace(self._inner.task(split, seed, index), tools=TOOLS)

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode(super().environment())

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns the question, a program and its result, and the answer.

        The program is what the taskset's `program(task)` returns; without one, None.
        """
        program = self._program(task)
        shown = self._inner.demonstration(task)
        if program is None or shown is None:
            return None
        answer = shown[-1]
        result = {"role": "tool", "content": answer["content"]}
        call = tool_calls.turn("python", code=program)
        return (*task.messages, call, result, answer)

    def attempts(self, task: protocol.Task) -> proofs.Attempts | None:
        """Returns the taskset's attempts after a program; the right one is its own."""
        own = proofs.attempts_of(self._inner, task)
        if own is None:
            return None
        call = tool_calls.turn("python", code=self._program(task) or "print(1)")
        wrong = tuple((call, *turns) for turns in own.wrong)
        partial = tuple(((call, *turns), earned) for turns, earned in own.partial)
        endless = (call,) * MAX_TURNS
        return proofs.Attempts((call, *own.right), (*wrong, endless), partial)

    def _program(self, task: protocol.Task) -> str | None:
        make = getattr(self._inner, "program", None)
        return make(task) if make else None


class Episode(wrapped.WrappedEpisode):
    """An episode with a sandbox, which starts with the first call."""

    def __init__(self, inner: protocol.Environment, max_turns: int = MAX_TURNS) -> None:
        """Wraps an environment; an episode is cut off after so many turns."""
        super().__init__(inner)
        self._max_turns, self._num_turns = max_turns, 0
        self._box: sandbox.Box | None = None

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Returns what programs print, or lets the environment score the answer."""
        self._num_turns += 1
        if not message.get("tool_calls"):
            return await super().step(message)
        if self._num_turns >= self._max_turns:
            reward = protocol.Reward(0.0, {"correct": 0.0})
            return protocol.StepResult((), reward, terminated=False, truncated=True)
        results, _ = await tool_calls.answer(message, TOOLS, self._run)
        return protocol.StepResult(results, None, terminated=False, truncated=False)

    async def close(self) -> None:
        """Ends the sandbox, if there is one."""
        box, self._box = self._box, None
        if box is not None:
            await box.close()
        await super().close()

    async def _run(self, name: str, arguments: Mapping[str, str]) -> str:
        del name  # the only tool
        if self._box is None:
            self._box = await sandbox.start(limits=_LIMITS)
        try:
            await self._box.write("program.py", arguments["code"].encode())
        except sandbox.FileError as error:  # of what earlier programs did
            raise tool_calls.CallError(str(error)) from error
        return (await self._box.run("python3 -I program.py")).text()
