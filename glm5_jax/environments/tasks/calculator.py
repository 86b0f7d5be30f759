"""The calculator: products too large for a small model, and a tool that computes them.

The environment answers a turn that has tool calls with their results. A turn without
calls ends the episode, and its content is scored. The model reads the errors of its
calls, such as an unknown tool or a division by zero, in tool messages.
"""

from collections.abc import Mapping
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import expressions, maths

MAX_TURNS = 4
_MAX_CALLS = 4  # of one turn
_MAX_ECHO = 40  # characters of the model's text in an error


class Calculator:
    """An environment with the tool `calc`."""

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        """Makes an environment that cuts off an episode after `max_turns` turns."""
        self._max_turns = max_turns
        self._answer = ""
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Returns the task's messages."""
        self._answer, self._num_turns = task.answer, 0
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Returns the results of the turn's calls, or the reward if it has none."""
        self._num_turns += 1
        calls = tuple(message.get("tool_calls") or ())
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
        """Does nothing: there are no resources to free."""


def calc(expression: str) -> str:
    """Returns the value of an expression, or a short error message."""
    try:
        return str(expressions.evaluate(expression))
    except expressions.ExpressionError as error:
        return f"error: {error}"


def _tool_message(call: Mapping[str, Any], content: str | None) -> messages.Message:
    """Returns the answer to a call, with the id of the call if it has one."""
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
    return calc(str(arguments["expression"]))  # JSON may have turned "5" into 5


def _ending(score: float, *, terminated: bool) -> protocol.StepResult:
    reward = protocol.Reward(score, {"correct": score})
    return protocol.StepResult((), reward, terminated, truncated=not terminated)
