"""A judge with a browser: decides the items of a checklist one by one.

A model is anything that answers messages with tools: `Ask`. It opens, clicks, types,
presses, reads and may take a screenshot of a submission, and says its verdict with a
tool. An item without a verdict fails.
"""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import browser, endpoint, tool_calls
from glm5_jax.environments.worlds.frontend import draft, oracle

Ask = endpoint.Ask
MAX_TURNS = 30  # of an item
_SECONDS = 30.0  # of a call
_MOST_TEXT = 4000  # characters of a page that `read` tells
VERDICT = "verdict"
_SYSTEM = (
    "You judge a web page against one statement. Use the page as a user would, and "
    "call verdict when you know. The page opens anew with open()."
)
TOOLS = (
    tool_calls.schema("open", "Opens the page anew."),
    tool_calls.schema("click", "Clicks an element.", selector="A CSS selector."),
    tool_calls.schema(
        "type",
        "Replaces the text of an input.",
        selector="A CSS selector.",
        text="The text.",
    ),
    tool_calls.schema(
        "press",
        "Presses a key on an element.",
        selector="A CSS selector.",
        text="The key, such as Enter.",
    ),
    tool_calls.schema(
        "choose",
        "Chooses an option of a select.",
        selector="A CSS selector.",
        text="The option.",
    ),
    tool_calls.schema(
        "read",
        "Tells how many elements there are, and whether the first one is visible, its "
        "text and its value.",
        selector="A CSS selector, such as body.",
    ),
    tool_calls.schema(
        VERDICT,
        "Ends the judgement.",
        answer='"yes" if the statement holds, "no" otherwise.',
    ),
)
SCREENSHOT = tool_calls.schema("screenshot", "Shows what the page looks like.")


@dataclasses.dataclass(frozen=True)
class Judgement:
    """An item's verdict, and all that led to it."""

    item: str
    verdict: bool | None  # None: the judge gave none
    history: tuple[messages.Message, ...]
    pictures: Mapping[str, bytes]  # PNG files by digest


async def judge(
    hands: "Hands", made: draft.Draft, item: draft.Item, ask: Ask, sees: bool = False
) -> Judgement:
    """Lets a model decide an item of a submission.

    Args:
        hands: on the submission; they serve all its items, one after another.
        made: the task.
        item: of its checklist.
        ask: the model.
        sees: whether it may take screenshots, as content of type image_url.
    """
    tools = (*TOOLS, SCREENSHOT) if sees else TOOLS
    asked = f"The page was made for this brief:\n{made.brief}\n\nThe statement: "
    history: list[messages.Message] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": asked + item.statement},
    ]
    hands.begin()
    for _ in range(MAX_TURNS):
        turn = await ask(_with_pictures(history, hands.pictures), tools)
        history.append(turn)
        if not turn.get("tool_calls"):
            break
        results, _ = await tool_calls.answer(turn, tools, hands.use)
        history += results
        history += hands.seen()
        if hands.verdict is not None:
            break
    return Judgement(item.name, hands.verdict, tuple(history), hands.pictures)


class Hands:
    """What a judge does with a submission."""

    def __init__(self, renderer: browser.Browser, files: oracle.Files) -> None:
        """Opens nothing yet."""
        self._renderer, self._site = renderer, browser.Site(files)
        self._session: browser.Session | None = None
        self._is_open = False
        self._new: list[str] = []
        self.verdict: bool | None = None
        self.pictures: dict[str, bytes] = {}

    def begin(self) -> None:
        """Starts with another item: the page opens anew, and there is no verdict."""
        self._is_open = False
        self.verdict, self.pictures = None, {}

    async def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the result of a tool.

        Raises:
            CallError: it cannot be used so.
        """
        if name == VERDICT:
            if arguments["answer"] not in ("yes", "no"):
                raise tool_calls.CallError("answer must be yes or no.")
            self.verdict = arguments["answer"] == "yes"
            return "noted"
        try:
            if self._session is None or name == "open" or not self._is_open:
                await self.close()
                self._session = await self._renderer.open(self._site, _SECONDS)
                self._is_open = True
            return await self._session.run(
                lambda page: self._do(page, name, arguments), _SECONDS
            )
        except oracle.StepError as error:
            raise tool_calls.CallError(str(error)) from error
        except browser.SlowPageError as error:
            await self.close()
            raise tool_calls.CallError(str(error)) from error

    def seen(self) -> list[messages.Message]:
        """Returns messages with the screenshots that were taken since the last call."""
        new, self._new = self._new, []
        return [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"sha256:{digest}"}}
                ],
            }
            for digest in new
        ]

    async def close(self) -> None:
        """Closes the page."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _do(self, page: Any, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "open":
            return "opened"
        if name == "screenshot":
            png = await page.screenshot(animations="disabled")
            digest = hashlib.sha256(png).hexdigest()
            self.pictures[digest] = png
            self._new.append(digest)
            return f"screenshot {digest[:12]}"
        if name == "read":
            found = await oracle.look(page, arguments["selector"])
            found["text"] = found["text"][:_MOST_TEXT]
            return json.dumps(found, ensure_ascii=False)
        text = (arguments["text"],) if "text" in arguments else ()
        await oracle.act(page, (name, arguments["selector"], *text))
        return "done"


def _with_pictures(
    history: Sequence[messages.Message], pictures: Mapping[str, bytes]
) -> list[messages.Message]:
    """Returns a history whose screenshots are in it, as endpoints take them."""

    def part(old: Any) -> Any:
        if not isinstance(old, Mapping) or old.get("type") != "image_url":
            return old
        png = pictures[old["image_url"]["url"].removeprefix("sha256:")]
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    return [
        {**message, "content": [part(x) for x in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in history
    ]
