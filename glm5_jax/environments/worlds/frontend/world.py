"""The world of front-end tasks: a page with scripts for a brief, judged by a checklist.

The reward is the oracle's (oracle.py): 1 if every item of the checklist passes.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import browser, proofs, protocol, tool_calls
from glm5_jax.environments.worlds.frontend import families, oracle, traces

MAX_TURNS = 20
_MOST_BYTES = 200_000  # of a submission
_HELD_OUT = 5  # one number in so many
SCHEMAS = (
    tool_calls.schema(
        "write",
        "Writes a file; what it was before is gone.",
        path="Its path, such as index.html.",
        content="All of it.",
    ),
    tool_calls.schema(tool_calls.SUBMIT, "Ends the task: the page is tested as it is."),
)
_ASKED = (
    "Write a page, index.html, with scripts of its own and no library, by write(path, "
    "content); other files may lie beside it. Names with # are ids of elements. Texts "
    "in quotes are word for word.\n\n{brief}\n\nsubmit() ends."
)


class Frontend:
    """Tasks of all families in turn, or of one: "frontend", "frontend:quiz"."""

    def __init__(self, name: str) -> None:
        """Finds the browser; it starts with the first submission.

        Raises:
            config.InputError: there is no such family, or no browser.
        """
        self.name = name
        wanted = name.partition(":")[2]
        if wanted and wanted not in families.ALL:
            raise config.InputError(
                f"{name!r}: there is no family {wanted!r}; there are "
                f"{', '.join(sorted(families.ALL))}."
            )
        self.families = [wanted] if wanted else sorted(families.ALL)
        self.browser = browser.Browser()

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; a hash of its number decides which split it is in."""
        turn, place = divmod(index, len(self.families))
        family = self.families[place]
        rng = random.Random(f"{split}/{seed}/{family}/{turn}")
        number = rng.randrange(2**31)
        while _is_held_out(number) != (split == "held_out"):
            number = rng.randrange(2**31)
        said = _ASKED.format(brief=traces.draft(family, number).brief)
        return protocol.Task(
            id=f"{family}/{number}",
            messages=({"role": "user", "content": said},),
            answer=(family, number),
            tools=SCHEMAS,
            tag=family,
        )

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode(self.browser)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the task and the turns that write the reference."""
        return (*task.messages, *self.attempts(task).right)

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the turns of the reference, and of its flawed versions."""
        right, *wrong = traces.draft(*task.answer).submissions().values()
        return proofs.Attempts(_turns(right), tuple(map(_turns, wrong)))

    def close(self) -> None:
        """Ends the browser."""
        self.browser.close()


class Episode:
    """An episode: files that are written, and tested at the end."""

    def __init__(self, renderer: browser.Browser) -> None:
        """Takes the browser that tests the page."""
        self._renderer = renderer
        self._answer: tuple[str, int] = ("", 0)
        self._files: dict[str, bytes] = {}
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Begins without files."""
        self._answer = task.answer
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Runs the turn's calls; submit, or a turn without calls, ends the episode."""
        self._num_turns += 1
        results, is_over = await tool_calls.answer(message, SCHEMAS, self._write)
        is_over |= not message.get("tool_calls")
        if is_over or self._num_turns >= MAX_TURNS:
            return await self._score(is_cut=not is_over)
        return protocol.StepResult(results, None, False, False)

    async def close(self) -> None:
        """Drops the files."""
        self._files.clear()

    async def _write(self, name: str, arguments: Mapping[str, Any]) -> str:
        del name  # the only tool besides submit
        path, text = arguments["path"], arguments["content"].encode()
        others = sum(len(old) for at, old in self._files.items() if at != path)
        if others + len(text) > _MOST_BYTES:
            raise tool_calls.CallError(f"all files have at most {_MOST_BYTES} bytes.")
        self._files[path.removeprefix("./")] = text
        return f"wrote {path}"

    async def _score(self, *, is_cut: bool) -> protocol.StepResult:
        """Decides the checklist."""
        items = traces.draft(*self._answer).items
        builds, passed = await oracle.decide(self._renderer, self._files, items)
        parts = {
            "builds": float(builds),
            "checklist": sum(passed.values()) / len(passed),
        }
        reward = protocol.Reward(float(all(passed.values())), parts)
        info = {"failed": [name for name, is_good in passed.items() if not is_good]}
        return protocol.StepResult((), reward, not is_cut, is_cut, info)


def _turns(html: str) -> tuple[messages.Message, ...]:
    written = tool_calls.turn("write", path="index.html", content=html)
    return (written, tool_calls.turn(tool_calls.SUBMIT))


def _is_held_out(number: int) -> bool:
    digest = hashlib.sha256(str(number).encode()).digest()
    return digest[0] % _HELD_OUT == 0
