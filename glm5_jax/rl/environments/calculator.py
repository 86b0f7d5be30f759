"""Products too large for a small model's head, and a tool that knows them.

A turn with tool calls is answered by their results and the episode goes on; a turn
without ends it, and what it says is scored. What is wrong with a call (an unknown tool,
a division by zero) comes back as a tool message for the model to read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from glm5_jax.data import tasks
from glm5_jax.rl.environments import expressions, maths, protocol

# "told": the tool is described in the prompt. "untold": it is there, but the prompt is
# spared the bytes of its description; SFT on demonstrations teaches the call.
# "none": a call gets nothing, so the answer must come out of the head.
Tool = Literal["told", "untold", "none"]

MAX_TURNS = 4
_MAX_CALLS = 4  # of one turn
_MAX_ECHO = 40  # characters of the model's words in an error


class CalculatorTasks:
    """The taskset "calculator", the same problems whatever the tool."""

    def __init__(self, name: str, problems: str, tool: Tool) -> None:
        """Sets tasks of data.tasks under another name.

        Args:
            name: of the taskset.
            problems: "calculator" with its size or without.
            tool: whether there is one, and whether the prompt says so.

        Raises:
            config.InputError: there are no such problems.
        """
        tasks.parse(problems)
        self.name = name
        self._problems, self._tool = problems, tool

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Problem `index` of the list that `seed` makes of the split."""
        problem = tasks.problem(self._problems, split, seed, index)
        tools = problem.tools if self._tool == "told" else ()
        id = f"{self.name}/{split}/{seed}/{index}"
        return protocol.Task(id, problem.messages, problem.answer, tools)

    def environment(self) -> protocol.Environment:
        """Answers calls, and scores the turn that has none."""
        return Calculator(has_tool=self._tool != "none")

    def demonstration(self, task: protocol.Task) -> Sequence[protocol.Message]:
        """The question, the call and its result if there is a tool, the answer."""
        split, seed, index = task.id.split("/")[-3:]
        problem = tasks.problem(self._problems, split, int(seed), int(index))
        turns = problem.demonstration
        return (*task.messages, turns[-1]) if self._tool == "none" else turns


class Calculator:
    """An environment with the tool `calc`, or without."""

    def __init__(self, has_tool: bool = True, max_turns: int = MAX_TURNS) -> None:
        """Cuts an episode off after `max_turns` turns."""
        self._has_tool, self._max_turns = has_tool, max_turns
        self._answer = ""
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[protocol.Message, ...]:
        """The task's messages."""
        self._answer, self._num_turns = task.answer, 0
        return task.messages

    async def step(self, message: protocol.Message) -> protocol.StepResult:
        """The results of the turn's calls, or its reward if it has none."""
        self._num_turns += 1
        calls = tuple(message.get("tool_calls") or ()) if self._has_tool else ()
        if not calls:
            is_right = maths.is_equal(self._answer, message.get("content"))
            return _ending(float(is_right), terminated=True)
        if self._num_turns >= self._max_turns:
            return _ending(0.0, terminated=False)
        results = tuple(
            _tool_message(call, "error: too many calls" if i >= _MAX_CALLS else None)
            for i, call in enumerate(calls)
        )
        return protocol.StepResult(results, None, terminated=False, truncated=False)

    async def close(self) -> None:
        """Nothing to free."""


def calc(expression: str) -> str:
    """What the tool says: the value, or what is wrong in a few words."""
    try:
        return str(expressions.evaluate(expression))
    except expressions.ExpressionError as error:
        return f"error: {error}"


def _tool_message(call: Mapping[str, Any], content: str | None) -> protocol.Message:
    """The answer to a call, under its id if it has one."""
    content = _result(call) if content is None else content
    message = {"role": "tool", "content": content}
    return message | ({"tool_call_id": call["id"]} if call.get("id") else {})


def _result(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    name, arguments = function.get("name"), function.get("arguments")
    if name != "calc":
        return f"error: no tool {str(name)[:_MAX_ECHO]!r}, only 'calc'"
    if not isinstance(arguments, Mapping) or "expression" not in arguments:
        return "error: calc needs 'expression'"
    return calc(str(arguments["expression"]))  # "5" may have been read as 5


def _ending(score: float, *, terminated: bool) -> protocol.StepResult:
    reward = protocol.Reward(score, {"correct": score})
    return protocol.StepResult((), reward, terminated, truncated=not terminated)
