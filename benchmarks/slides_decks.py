"""Plays decks of the slides world, and writes what of them SFT trains on.

slides_world.py --select is the command. An author is a model behind an endpoint, or a
script whose pages have a flaw at a set rate.
"""

import asyncio
import collections
import json
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import endpoint, protocol
from glm5_jax.environments.worlds.slides import briefs, flaws, selection, world

_AT_ONCE = 4  # episodes
Author = Callable[[protocol.Task, int], endpoint.Ask]  # of a task's deck by its number


def scripted(taskset: world.Slides, rate: float) -> Author:
    """Returns an author that writes sound pages but for a share of them.

    Args:
        taskset: knows sound pages.
        rate: probability that a page has a flaw.
    """

    def of(task: protocol.Task, number: int) -> endpoint.Ask:
        rng = random.Random(f"{task.id}/{number}")
        turns = [dict(turn) for turn in taskset.attempts(task).right]
        for turn, page in zip(turns, briefs.make(*task.answer).pages, strict=False):
            able = [
                x for x in flaws.ALL.values() if page.kind in (x.kinds or page.kind)
            ]
            (call,) = turn["tool_calls"]
            given = call["function"]["arguments"]
            if rng.random() < rate:
                flawed = rng.choice(able).make(given["html"], page, rng)
                given = {**given, "html": flawed}
            function = {**call["function"], "arguments": given}
            turn["tool_calls"] = [{**call, "function": function}]

        async def answer(
            history: Sequence[messages.Message], tools: Sequence[Mapping[str, Any]]
        ) -> messages.Message:
            del tools
            return turns[sum(message["role"] == "assistant" for message in history)]

        return answer

    return of


async def play(
    taskset: world.Slides, task: protocol.Task, ask: endpoint.Ask
) -> selection.Deck:
    """Plays an episode of a task."""
    episode = taskset.environment()
    try:
        history = [*await episode.reset(task)]
        while True:
            turn = await ask(history, task.tools)
            done = await episode.step(turn)
            history += [turn, *done.messages]
            if done.reward is not None:
                break
    finally:
        await episode.close()
    parts = done.reward.parts.items()
    named = {name.removeprefix("page_"): score for name, score in parts}
    scores = {int(name): score for name, score in named.items() if name.isdigit()}
    return selection.Deck(task.id, history, scores)


async def select(
    taskset: world.Slides,
    author: Author,
    num_briefs: int,
    num_decks: int,
    least: float,
    out: pathlib.Path,
) -> dict[str, Any]:
    """Plays decks, writes a line of SFT of each brief, and returns what became of them.

    Args:
        taskset: of the briefs, of which the first of the training split are taken.
        author: of the decks.
        num_briefs: to play.
        num_decks: of each brief.
        least: score that a page must have.
        out: file of the lines.
    """
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(task: protocol.Task, number: int) -> selection.Deck:
        async with gate:
            return await play(taskset, task, author(task, number))

    tasks = [taskset.task("train", 0, index) for index in range(num_briefs)]
    work = [one(task, number) for task in tasks for number in range(num_decks)]
    decks = await asyncio.gather(*work)
    chosen = selection.choose(decks, least)
    lines = [
        json.dumps({"messages": shown, "tools": [*world.SCHEMAS]})
        for _, shown in chosen.values()
    ]
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    kinds = collections.Counter(how for how, _ in chosen.values())
    turns = [message for _, shown in chosen.values() for message in shown]
    return {
        "decks": len(decks),
        "decks_with_good_pages_alone": len(
            [deck for deck in decks if min(deck.scores.values()) >= least]
        ),
        "briefs": num_briefs,
        **{f"briefs_{how}": kinds[how] for how in ("whole", "joined", "masked")},
        "briefs_dropped": num_briefs - len(chosen),
        "turns": sum(message["role"] == "assistant" for message in turns),
        "turns_masked": sum(message.get("is_masked", False) for message in turns),
    }
