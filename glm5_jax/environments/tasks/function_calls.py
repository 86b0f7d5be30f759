"""The Berkeley Function Calling Leaderboard's tasks of one turn: "bfcl:parallel".

The JSON files of PyPI's package bfcl-eval are read; nothing of the package runs. A
turn's calls are judged by call_check.py. Where no function fits, the right answer is a
text without a call.
"""

import functools
import importlib.util
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol
from glm5_jax.environments.tasks import call_check

PREFIX = "bfcl"
CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
    *("irrelevance", "live_irrelevance"),
)
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


class FunctionCalls:
    """The tasks of all categories, or of one; for evaluation alone."""

    splits = ("held_out",)

    def __init__(self, name: str) -> None:
        """Reads the tasks.

        Raises:
            config.InputError: the package is missing, or there is no such category.
        """
        self.name = name
        wanted = name.partition(":")[2]
        if wanted and wanted not in CATEGORIES:
            raise config.InputError(
                f"{name!r}: there is no category {wanted!r}; there are "
                f"{', '.join(CATEGORIES)}."
            )
        rows = [_read(one) for one in ([wanted] if wanted else CATEGORIES)]
        mixed = itertools.chain(*itertools.zip_longest(*rows))
        self._tasks = [task for task in mixed if task is not None]

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task, of all categories in turn while they last.

        Raises:
            config.InputError: the split is not held_out.
        """
        del seed  # the tasks are what they are
        if split not in self.splits:
            raise config.InputError(
                f"{self.name} is for evaluation: it has no tasks in {split}."
            )
        return self._tasks[index % len(self._tasks)]

    def size(self, split: str) -> int:
        """Returns the number of tasks of a split."""
        return len(self._tasks) if split in self.splits else 0

    def environment(self) -> "Episode":
        """Returns an environment that judges one turn."""
        return Episode()

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the task's messages, and calls made of the possible answers."""
        return (*task.messages, _right(task))

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns right calls, and calls that lack, add or change something."""
        calls = [call_check.right_call(possible) for possible in task.answer]
        other = ("a_function_of_nobody", {})
        if not calls:
            function = task.tools[0]["function"]["name"] if task.tools else other[0]
            return proofs.Attempts([_right(task)], ((_turn([(function, {})]),),))
        name, arguments = calls[0]
        wrong = [
            [*calls, calls[0]],
            [other, *calls[1:]],
            [(name, {**arguments, "more": 1}), *calls[1:]],
            *(
                [(name, {**arguments, key: ["changed"]}), *calls[1:]]
                for key in list(arguments)[:1]
            ),
        ]
        turns = [[_turn(each)] for each in wrong]
        said = [{"role": "assistant", "content": "I cannot do this."}]
        return proofs.Attempts([_right(task)], (*turns, said))


class Episode:
    """An episode of one turn."""

    def __init__(self) -> None:
        """Makes an environment without a task."""
        self._wanted: Sequence[call_check.Possible] = ()

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Returns the task's messages."""
        self._wanted = task.answer
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Judges the calls of the turn."""
        try:
            calls = [messages.call_of(c) for c in message.get("tool_calls") or ()]
        except config.InputError:
            correct = 0.0
        else:
            is_said = bool(calls) or bool(str(message.get("content") or "").strip())
            correct = float(is_said and call_check.is_right(calls, self._wanted))
        reward = protocol.Reward(correct, {"correct": correct})
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self) -> None:
        """Does nothing: there are no resources to free."""


@functools.cache
def _read(category: str) -> list[protocol.Task]:
    """Returns the tasks of a category.

    Raises:
        config.InputError: the package is not installed.
    """
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or found.origin is None:
        raise config.InputError(
            "The tasks 'bfcl' need the data of a package: pip install --no-deps "
            "bfcl-eval."
        )
    folder = pathlib.Path(found.origin).parent / "data"
    file = f"BFCL_v4_{category}.json"
    answers = {}
    if "irrelevance" not in category:
        rows = _lines(folder / "possible_answer" / file)
        answers = {row["id"]: row["ground_truth"] for row in rows}
    tasks = []
    for row in _lines(folder / file):
        tools = tuple(map(_tool, row["function"]))
        wanted = [_possible(one, tools) for one in answers.get(row["id"], ())]
        if not all(all(one.values()) for each in wanted for one in each.values()):
            continue  # a parameter has no possible value: no call is right
        said = tuple(row["question"][0])
        tasks.append(protocol.Task(row["id"], said, wanted, tools, row["id"], category))
    return tasks


def _lines(path: pathlib.Path) -> list[Any]:
    lines = path.read_text("utf-8").split("\n")  # not at U+2028, as splitlines
    return [json.loads(line) for line in lines if line]


def _name(name: str) -> str:
    """Returns a name that every form of calls allows: without dots."""
    return name.replace(".", "_")


def _possible(
    answer: call_check.Possible, tools: Sequence[Mapping[str, Any]]
) -> call_check.Possible:
    """Returns a possible answer with the tools' names, parameters and types."""
    ((name, parameters),) = answer.items()
    functions = [tool["function"] for tool in tools]
    (schema,) = (f["parameters"] for f in functions if f["name"] == _name(name))
    known = schema["properties"]
    wanted: dict[str, Sequence[Any]] = {}
    for key, values in parameters.items():
        if key not in known:
            if "" not in values:
                wanted[key] = ()
            continue
        if key in schema["required"] and values != [""]:
            values = [one for one in values if one != ""]
        is_whole = known[key].get("type") == "integer"
        wanted[key] = [_whole(one) if is_whole else one for one in values]
    return {_name(name): wanted}


def _whole(value: Any) -> Any:
    """Returns the integer of a float that equals one; the data has 5.0 for some."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tool(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a tool, in the types of JSON."""
    described = {
        "name": _name(function["name"]),
        "description": function["description"],
        "parameters": _schema(function["parameters"]),
    }
    return {"type": "function", "function": described}


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_schema, value)]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    fields = {key: _schema(one) for key, one in value.items()}
    if isinstance(kind, str) and kind in _TYPES:
        del fields["type"]
        if known := _TYPES[kind]:
            return {"type": known, **fields}
    return fields


def _turn(calls: Sequence[call_check.Call]) -> messages.Message:
    made = [{"function": {"name": name, "arguments": dict(a)}} for name, a in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _right(task: protocol.Task) -> messages.Message:
    if not task.answer:
        return {"role": "assistant", "content": "No function fits."}
    return _turn([call_check.right_call(possible) for possible in task.answer])
