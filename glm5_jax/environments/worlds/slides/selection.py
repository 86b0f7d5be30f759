"""What of judged decks is worth training on: rejection, best pages, masks.

keep_best     whole decks: the best of a brief, if it is good enough
best_pages    the best page of each number, from several decks of one brief
joined        a deck of these pages
masked        a deck's conversation in which turns with flawed pages are not trained
choose        all of it: one conversation of each brief
"""

import dataclasses
from collections.abc import Mapping, Sequence

from glm5_jax import messages
from glm5_jax.environments import tool_calls
from glm5_jax.environments.worlds.slides import markup, world


@dataclasses.dataclass(frozen=True)
class Deck:
    """A played episode.

    Attributes:
        task: its id.
        history: all messages.
        scores: of its pages, by number from 1.
    """

    task: str
    history: Sequence[messages.Message]
    scores: Mapping[int, float]

    @property
    def total(self) -> float:
        """Returns the mean of the pages."""
        return sum(self.scores.values()) / len(self.scores)


def keep_best(decks: Sequence[Deck], least: float) -> list[Deck]:
    """Returns the best deck of each brief whose pages all score `least` or more.

    Of equal decks the one with fewer messages is taken.
    """
    found: dict[str, Deck] = {}
    for deck in decks:
        other = found.get(deck.task)
        if min(deck.scores.values()) >= least and (
            other is None
            or (deck.total, -len(deck.history)) > (other.total, -len(other.history))
        ):
            found[deck.task] = deck
    return [*found.values()]


def best_pages(decks: Sequence[Deck], least: float) -> dict[int, str]:
    """Returns the best HTML of each page, from decks of one brief.

    Args:
        decks: of the brief.
        least: score that a page must have.
    """
    best: dict[int, tuple[float, str]] = {}
    for deck in decks:
        for number, (_, html) in _written(deck).items():
            score = deck.scores[number]
            if score >= least and score > best.get(number, (-1.0, ""))[0]:
                best[number] = (score, html)
    return {number: html for number, (_, html) in sorted(best.items())}


def joined(decks: Sequence[Deck], least: float) -> Deck | None:
    """Returns a deck of the best pages of several; None if no deck has one of them.

    Args:
        decks: of one brief.
        least: score that a page must have.
    """
    found, first = best_pages(decks, least), decks[0]
    if set(found) != set(first.scores):
        return None
    history = [m for m in first.history if m["role"] in ("system", "user")][:1]
    for number, html in found.items():
        turn = tool_calls.turn("write", page=number, html=html)
        told = tool_calls.result(turn["tool_calls"][0], world.WROTE.format(number))
        history += [turn, told]
    history.append(tool_calls.turn(tool_calls.SUBMIT))
    scores = {n: max(deck.scores[n] for deck in decks) for n in first.scores}
    return Deck(first.task, history, scores)


def choose(
    decks: Sequence[Deck], least: float
) -> dict[str, tuple[str, list[messages.Message]]]:
    """Returns a conversation of each brief to train on, and how it was made, by task.

    It is the best deck ("whole"); if none has good pages alone, a deck of the good
    pages of several ("joined"); if one is missing, the deck with the highest score
    whose flawed pages are masked ("masked"). A brief without a good page has none.

    Args:
        decks: of several briefs.
        least: score that a page must have.
    """
    found = {deck.task: ("whole", deck) for deck in keep_best(decks, least)}
    for task in dict.fromkeys(deck.task for deck in decks):
        group = [deck for deck in decks if deck.task == task]
        good = [deck for deck in group if max(deck.scores.values()) >= least]
        if task in found or not good:
            continue
        deck = joined(group, least)
        best = max(good, key=lambda deck: deck.total)
        found[task] = ("joined", deck) if deck else ("masked", best)
    return {task: (how, masked(deck, least)) for task, (how, deck) in found.items()}


def masked(deck: Deck, least: float) -> list[messages.Message]:
    """Returns a conversation that trains only the turns which wrote good pages.

    Masked are turns that write a page which scores less than `least`, or one that is
    written anew later: nobody judged it. Other turns are kept as they are.

    Args:
        deck: whose history is copied.
        least: score that a page must have.
    """
    last = {number: place for number, (place, _) in _written(deck).items()}
    return [
        {**message, "is_masked": True}
        if any(
            deck.scores[number] < least or last[number] != place
            for number, _ in _pages_in(message, deck)
        )
        else message
        for place, message in enumerate(deck.history)
    ]


def _written(deck: Deck) -> dict[int, tuple[int, str]]:
    """Returns by page the place of the message that wrote it last, and its HTML."""
    return {
        number: (place, html)
        for place, message in enumerate(deck.history)
        for number, html in _pages_in(message, deck)
    }


def _pages_in(message: messages.Message, deck: Deck) -> list[tuple[int, str]]:
    """Returns number and HTML of the pages that a turn wrote.

    The answers would tell, but an episode's last turn has none.
    """
    calls = tool_calls.taken(message, world.SCHEMAS)
    return [
        (a["page"], a["html"])
        for name, a in calls
        if name == "write"
        and a["page"] in deck.scores
        and len(a["html"]) <= markup.MOST_CHARACTERS
    ]
