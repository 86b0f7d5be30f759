"""The world of slides: a deck in HTML for a brief, laid out by a browser and judged."""

import asyncio
import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import browser, proofs, protocol, tool_calls
from glm5_jax.environments.worlds.slides import (
    briefs,
    checks,
    flaws,
    markup,
    measure,
    pages,
)

_NAME = re.compile(r"slides(?::([1-6]))?")
_NUM_PAGES = 3  # of a deck, if the name says none
_HELD_OUT = 5  # one brief in so many
_TURNS_A_PAGE = 6
_NUM_HACKS = 3  # among the wrong attempts of a task
_SHOWN_WORDS = 60  # that look() tells of
WROTE = "wrote page {}"  # the result of a call
SCHEMAS = (
    tool_calls.schema(
        "write",
        "Writes a page; what it was before is gone.",
        integers=("page",),
        page="Number of the page, from 1.",
        html="The whole document.",
    ),
    tool_calls.schema(
        "look",
        "Tells how the browser lays a page out.",
        integers=("page",),
        page="Number of the page, from 1.",
    ),
    tool_calls.schema(tool_calls.SUBMIT, "Ends the task: the deck is judged as it is."),
)


class Slides:
    """Decks of three pages, or of another number: "slides", "slides:1"."""

    def __init__(self, name: str) -> None:
        """Finds the browser; it starts with the first page.

        Raises:
            config.InputError: the number of pages is out of bounds, or there is no
                browser.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise config.InputError(
                f"rl.environment={name!r} must be slides or slides:PAGES, with 1 to 6 "
                "pages."
            )
        self.name = name
        self.num_pages = int(found[1] or _NUM_PAGES)
        self.browser = browser.Browser()

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; a hash of its number decides which split it is in."""
        rng = random.Random(f"{split}/{seed}/{index}")
        number = rng.randrange(2**31)
        while _is_held_out(number) != (split == "held_out"):
            number = rng.randrange(2**31)
        brief = briefs.make(number, self.num_pages)
        said = {"role": "user", "content": briefs.instruction(brief)}
        return protocol.Task(
            id=f"{self.num_pages}/{number}",
            messages=(said,),
            answer=(number, self.num_pages),
            tools=SCHEMAS,
            tag="+".join(sorted({page.kind for page in brief.pages})),
        )

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode(self.browser)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the task and the turns that write a sound deck."""
        return (*task.messages, *self.attempts(task).right)

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the turns of a sound deck, and of empty and deceiving ones."""
        number, num_pages = task.answer
        brief, look = briefs.make(number, num_pages), pages.style(number)
        sound = [pages.render(page, look) for page in brief.pages]
        wrong = [[f"<!doctype html><p>{page.title}</p>" for page in brief.pages]]
        rng = random.Random(number)
        hacks = [x for x in flaws.ALL.values() if x.is_hack and not x.kinds]
        for hack in rng.sample(hacks, _NUM_HACKS):
            made = zip(sound, brief.pages, strict=True)
            wrong.append([hack.make(html, page, rng) for html, page in made])
        return proofs.Attempts(_turns(sound), tuple(map(_turns, wrong)))

    def close(self) -> None:
        """Ends the browser."""
        self.browser.close()


class Episode:
    """An episode: pages that are written, and judged at the end."""

    def __init__(self, renderer: browser.Browser) -> None:
        """Takes the browser that renders the pages."""
        self._renderer = renderer
        self._brief: briefs.Brief | None = None
        self._written: dict[int, str] = {}
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Makes the brief."""
        self._brief = briefs.make(*task.answer)
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Runs the turn's calls; submit, or a turn without calls, ends the episode."""
        assert self._brief is not None
        self._num_turns += 1
        results, is_over = await tool_calls.answer(message, SCHEMAS, self._run)
        is_over |= not message.get("tool_calls")
        most = _TURNS_A_PAGE * len(self._brief.pages)
        if is_over or self._num_turns >= most:
            return await self._score(is_cut=not is_over)
        return protocol.StepResult(results, None, False, False)

    async def close(self) -> None:
        """Drops the pages."""
        self._written.clear()

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        assert self._brief is not None
        number, count = arguments["page"], len(self._brief.pages)
        if not 1 <= number <= count:
            raise tool_calls.CallError(f"there are pages 1 to {count}.")
        if name == "write":
            if len(arguments["html"]) > markup.MOST_CHARACTERS:
                raise tool_calls.CallError(
                    f"a page has at most {markup.MOST_CHARACTERS} characters."
                )
            self._written[number] = arguments["html"]
            return WROTE.format(number)
        if number not in self._written:
            raise tool_calls.CallError(f"page {number} is not written yet.")
        html, images = self._written[number], self._brief.images
        return seen(await measure.measure(self._renderer, html, images))

    async def _score(self, *, is_cut: bool) -> protocol.StepResult:
        """Judges every page; the reward is their mean."""
        assert self._brief is not None
        brief = self._brief
        written = [self._written.get(i, "") for i in range(1, len(brief.pages) + 1)]
        verdicts = await asyncio.gather(
            *(
                checks.judge(self._renderer, html, page, brief.images)
                for html, page in zip(written, brief.pages, strict=True)
            )
        )
        scores = [verdict.score for verdict in verdicts]
        parts = {"sound_pages": sum(v.is_sound for v in verdicts) / len(verdicts)}
        parts |= {f"page_{i}": score for i, score in enumerate(scores, 1)}
        info = {
            "version": checks.version(),
            "failed": {i: [*v.failed, *v.problems] for i, v in enumerate(verdicts, 1)},
        }
        reward = protocol.Reward(sum(scores) / len(scores), parts)
        return protocol.StepResult((), reward, not is_cut, is_cut, info)


def seen(facts: measure.Facts) -> str:
    """Returns what an agent reads of a page: its texts by place and size."""
    if facts.problems:
        return f"The page is not rendered: {'; '.join(facts.problems)}."
    layout = facts.layout
    lines = [
        f"slide: {_places(layout['slide'])}; window: "
        f"{layout['window'][0]} by {layout['window'][1]}"
    ]
    for block in layout["blocks"]:
        said = " ".join(block["text"].split()[:_SHOWN_WORDS])
        lines.append(f"<{block['tag']}> {_places(block['inner'])}: {said}")
    for image in layout["images"]:
        wide, high = image["natural"]
        lines.append(
            f"picture {image['source']} {_places(image['box'])}, file {wide} by {high}"
        )
    return "\n".join(lines)


def _places(box: measure.Box) -> str:
    left, top, right, bottom = map(round, box)
    return f"x {left} to {right}, y {top} to {bottom}"


def _turns(documents: Sequence[str]) -> tuple[messages.Message, ...]:
    written = [
        tool_calls.turn("write", page=number, html=html)
        for number, html in enumerate(documents, 1)
    ]
    return (*written, tool_calls.turn(tool_calls.SUBMIT))


def _is_held_out(number: int) -> bool:
    digest = hashlib.sha256(str(number).encode()).digest()
    return digest[0] % _HELD_OUT == 0
