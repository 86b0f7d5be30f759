"""The world of web pages: tools look, click and type, the page's own reward."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import browser, proofs, protocol, tool_calls
from glm5_jax.environments.tasks import problems
from glm5_jax.environments.worlds.miniwob import oracles
from glm5_jax.environments.worlds.miniwob import page as page_lib

MAX_TURNS = 12
_SAID = (
    "A web page is open in a browser. Do what it asks; the page notices when you have."
)
TOOLS = (
    tool_calls.schema("look", "Shows what the page asks and its elements by number."),
    tool_calls.schema(
        "click", "Clicks an element.", integers=("element",), element="Its number."
    ),
    tool_calls.schema(
        "type",
        "Puts a text into a field.",
        integers=("element",),
        element="Its number.",
        text="The text.",
    ),
)


class MiniWoB:
    """Pages of all families that a script solves, or of any one: "miniwob:FAMILY"."""

    def __init__(self, name: str) -> None:
        """Takes the families.

        Raises:
            config.InputError: there is no such page, or no browser.
        """
        self.name = name
        wanted = name.partition(":")[2]
        known = {path.stem for path in (page_lib.html() / "miniwob").glob("*.html")}
        if wanted and wanted not in known:
            raise config.InputError(
                f"{name!r}: there is no page {wanted!r}; scripts solve "
                f"{', '.join(oracles.ALL)}, and there are {len(known)} pages in all."
            )
        self.browser = browser.Browser()
        self.families = [wanted] if wanted else [*oracles.ALL]

    def close(self) -> None:
        """Ends the browser; the next page starts it again."""
        self.browser.close()

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; a hash of the page's seed decides which split it is in."""
        turn, place = divmod(index, len(self.families))
        family = self.families[place]
        rng = random.Random(f"{split}/{seed}/{family}/{turn}")
        number = rng.randrange(2**31)
        while problems.split_of(f"{family}/{number}") != split:
            number = rng.randrange(2**31)
        key = f"{family}/{number}"
        said = ({"role": "user", "content": _SAID},)
        return protocol.Task(key, said, (family, number), TOOLS, key, family)

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode(self.browser)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns None: what a page shows is known only while it is open."""
        del task

    def attempts(self, task: protocol.Task) -> proofs.Attempts | None:
        """Returns the script's calls, and calls that miss one or use another element.

        The browser opens the page once, to see what it asks.
        """
        family, number = task.answer
        if family not in oracles.ALL:
            return None
        query, elements = _in_thread(lambda: _seen(self.browser, family, number))
        right = oracles.ALL[family](query, elements)
        used = {element for _, element, _ in right}
        other = [n for n in range(len(elements)) if n not in used]
        end = {"role": "assistant", "content": "Done."}
        look = tool_calls.turn("look")
        wrong = [[look, *map(_turn, right[:-1]), end]]
        if other:
            wrong.append([look, _turn(("click", other[0], "")), end])
        if any(what == "type" for what, _, _ in right):
            changed = [(what, n, text and f"{text}x") for what, n, text in right]
            wrong.append([look, *map(_turn, changed), end])
        return proofs.Attempts([look, *map(_turn, right)], tuple(map(tuple, wrong)))


class Episode:
    """An episode with a page of its own."""

    def __init__(self, renderer: browser.Browser, max_turns: int = MAX_TURNS) -> None:
        """Makes an environment that cuts an episode off after so many turns."""
        self._browser, self._max_turns = renderer, max_turns
        self._num_turns = 0
        self._page: page_lib.Page | None = None

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Opens the page."""
        self._page = await page_lib.opened(self._browser, *task.answer)
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Carries out the turn's calls; a turn without calls ends the episode."""
        assert self._page is not None
        self._num_turns += 1
        results, _ = await tool_calls.answer(message, TOOLS, self._run)
        reward = await self._page.reward()
        is_over = reward is not None or not message.get("tool_calls")
        if not is_over and self._num_turns < self._max_turns:
            return protocol.StepResult(results, None, False, False)
        solved = float(reward == 1.0)
        parts = {"solved": solved, "page": reward or 0.0}
        total = protocol.Reward(solved, parts)
        return protocol.StepResult((), total, is_over, not is_over)

    async def close(self) -> None:
        """Closes the page."""
        if self._page is not None:
            await self._page.close()

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        page = self._page
        assert page is not None
        if await page.reward() is not None:
            raise tool_calls.CallError("the task is over.")
        if name == "look":
            return shown(*await page.look())
        if name == "click":
            await page.click(arguments["element"])
            return "clicked"
        await page.type(arguments["element"], arguments["text"])
        return "typed"


def shown(query: str, elements: Sequence[page_lib.Element]) -> str:
    """Returns what an agent reads of a page."""
    lines = [f"The page asks: {query}"]
    for number, one in enumerate(elements):
        value = f" = {one.value!r}" if one.kind in ("text", "password") else ""
        mark = " (chosen)" if one.checked else ""
        lines.append(f"[{number}] {one.kind}: {one.text}{value}{mark}")
    return "\n".join(lines)


async def _seen(
    renderer: browser.Browser, family: str, number: int
) -> tuple[str, Sequence[page_lib.Element]]:
    page = await page_lib.opened(renderer, family, number)
    try:
        return await page.look()
    finally:
        await page.close()


def _in_thread(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Returns the result of a coroutine, run by a loop of its own in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(make())))
    thread.start()
    thread.join()
    return results[0]


def _turn(call: oracles.Call) -> messages.Message:
    what, element, text = call
    more = {"text": text} if what == "type" else {}
    return tool_calls.turn(what, element=element, **more)
