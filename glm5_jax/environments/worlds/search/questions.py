"""Questions whose answer is at the end of a walk over the links of articles.

    Begin at the article that says of its subject: "A language of 1974, ... ?" The
    article refers to an article filed under "person" (1); 1 refers to an article filed
    under "operating system" that mentions the year 1969 (2). What is the title of 2?

The first article is a rare one: one to three others refer to it. To any on the way
refer 40 at most, because a few are so well known that many ways end there. The name is
replaced by "?" in the defining sentence, and so is the name of an article that the
sentence links to, which is described by the sentence that defines it. Of the articles
on the way, the question tells what they are filed under, and years where needed.
"""

import collections
import dataclasses
import functools
import random
import re
from collections.abc import Collection, Iterator

from glm5_jax.environments.worlds.search import articles

MIN_HOPS, MAX_HOPS = 2, 4
_MOST_SOURCES = 3  # of a rare article
_MOST_SOURCES_ON_THE_WAY = 40
_MIN_WORDS, _MAX_WORDS = 8, 60  # of a sentence that defines
_SENTENCE = re.compile(
    r"(.+?(?<!e\.g)(?<!i\.e)[.?!])(?=\s+[\"'({]*[A-Z]|\s*$)", re.DOTALL
)
_LEAD = re.compile(r"^\s*(<[^<>]*>)?\s*(/[^/\n]+/\s*)?(\([^()]*\)\s*)?")


@dataclasses.dataclass(frozen=True)
class Clue:
    """A property of an article: what it is filed under, or a year that it mentions."""

    kind: str  # "tag" or "year"
    value: str

    def holds(self, article: articles.Article) -> bool:
        """Returns whether an article has the property."""
        return self.value in (article.tags if self.kind == "tag" else article.years)


@dataclasses.dataclass(frozen=True)
class Question:
    """A walk and what is told of it.

    Attributes:
        path: the articles' numbers, from the described one to the answer.
        description: of the first article.
        clues: to the other articles.
    """

    path: tuple[int, ...]
    description: str
    clues: tuple[tuple[Clue, ...], ...]

    @property
    def hops(self) -> int:
        """Returns the links that are walked."""
        return len(self.path) - 1

    def text(self) -> str:
        """Returns the question."""
        steps, here = [], "It"
        for number, clues in enumerate(self.clues, 1):
            steps.append(f"{here} refers to an article {_told(clues)} ({number}).")
            here = f"Article {number}"
        return (
            f"Articles of a collection refer to each other. Begin at the article that "
            f'says of its subject ("?"): "{self.description}" {" ".join(steps)} '
            f"What is the title of article {self.hops}?"
        )


def walk(graph: articles.Graph, rng: random.Random, hops: int) -> Question | str:
    """Walks from a rare article and tells as little as makes the way the only one.

    Args:
        graph: to walk in.
        rng: decides everything.
        hops: links to walk.

    Returns:
        A question, or why there is none.
    """
    rare = _rare(graph)
    if not rare:
        return "no article is rare"
    path = [rng.choice(rare)]
    if not definition(graph.articles[path[0]]):
        return "the first article has no defining sentence"
    for _ in range(hops):
        there = [t for t in graph.targets[path[-1]] if t not in path]
        told = [
            t
            for t in there
            if graph.articles[t].tags
            and len(graph.sources[t]) <= _MOST_SOURCES_ON_THE_WAY
        ]
        if not told:
            return "the walk ends too early"
        path.append(rng.choice(told))
    description = describe(graph, path[0])
    firsts = described(graph)[description]
    clues: list[tuple[Clue, ...]] = [
        (Clue("tag", rng.choice(graph.articles[n].tags)),) for n in path[1:]
    ]
    question = Question(tuple(path), description, tuple(clues))
    if is_only_way(graph, firsts, question):
        return question
    for hop in reversed(range(hops)):
        years = sorted(graph.articles[path[hop + 1]].years)
        if years:
            clues[hop] += (Clue("year", rng.choice(years)),)
            question = dataclasses.replace(question, clues=tuple(clues))
            if is_only_way(graph, firsts, question):
                return question
    return "other articles fit all clues"


def forward(
    graph: articles.Graph, firsts: Collection[int], question: Question
) -> list[set[int]]:
    """Returns all articles that each place of the walk may have, from the first on."""
    places = [set(firsts)]
    for clues in question.clues:
        there = {target for n in places[-1] for target in graph.targets[n]}
        places.append({n for n in there if _fits(graph.articles[n], clues)})
    return places


def is_only_way(
    graph: articles.Graph, firsts: Collection[int], question: Question
) -> bool:
    """Returns whether one answer fits, and only this way leads back from it.

    Forward, every article that the clues allow is followed; backward, every one that
    links to the answer and could be reached. Both are exact: all articles are asked.
    """
    places = forward(graph, firsts, question)
    if places[-1] != {question.path[-1]}:
        return False
    back = places[-1]
    for place, right in zip(places[-2::-1], question.path[-2::-1], strict=True):
        back = {source for n in back for source in graph.sources[n]} & place
        if back != {right}:
            return False
    return True


def describe(graph: articles.Graph, number: int) -> str:
    """Returns the sentence that defines an article, without its names.

    One of the names that the sentence links to, the rarest, is described too.
    """
    article = graph.articles[number]
    sentence = definition(article)
    linked = [graph.find(name) for name in articles.links_of(sentence)]
    known = {
        other: definition(graph.articles[other])
        for other in linked
        if other is not None and other != number
    }
    obscured = [other for other, told in known.items() if told]
    text = articles.plain(sentence)
    if obscured:
        rarest = min(obscured, key=lambda n: (len(graph.sources[n]), n))
        other = graph.articles[rarest]
        told = _without(articles.plain(known[rarest]), (*other.names, *article.names))
        text = _without(text, other.names, f'[of which is said: "{told}"]')
    return _without(text, article.names)


def definition(article: articles.Article) -> str:
    """Returns the first sentence, with links; "" if it is too short or too long."""
    first = article.text.strip().split("\n\n")[0]
    text = " ".join(_LEAD.sub("", first).split())
    found = _SENTENCE.match(text)
    if found is None:
        return ""
    return found[1] if _MIN_WORDS <= len(found[1].split()) <= _MAX_WORDS else ""


@functools.cache
def described(graph: articles.Graph) -> dict[str, list[int]]:
    """Returns all articles by their descriptions."""
    found = collections.defaultdict(list)
    for number, article in enumerate(graph.articles):
        if definition(article):
            found[describe(graph, number)].append(number)
    return found


@functools.cache
def _rare(graph: articles.Graph) -> tuple[int, ...]:
    sizes = map(len, graph.sources)
    return tuple(n for n, size in enumerate(sizes) if 1 <= size <= _MOST_SOURCES)


def _fits(article: articles.Article, clues: Collection[Clue]) -> bool:
    return all(clue.holds(article) for clue in clues)


def _told(clues: Collection[Clue]) -> str:
    words = {"tag": 'filed under "{}"', "year": "that mentions the year {}"}
    return " ".join(words[clue.kind].format(clue.value) for clue in clues)


def _without(text: str, names: Collection[str], instead: str = "?") -> str:
    """Replaces names in a text where they are whole words, the longest first."""
    for name in _longest_first(names):
        pattern = rf"(?<!\w){re.escape(name)}(?!\w)"
        text = re.sub(pattern, lambda _: instead, text, flags=re.IGNORECASE)
    return text


def _longest_first(names: Collection[str]) -> Iterator[str]:
    yield from sorted(names, key=lambda name: (-len(name), name))
