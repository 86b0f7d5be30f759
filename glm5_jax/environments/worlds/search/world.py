"""The taskset "search:COLLECTION": questions that take several articles to answer.

COLLECTION is foldoc, manpages or a file of JSON lines (articles.py), with the links to
walk or without: "search:foldoc:2-4". A turn without a call is the answer: a title, or
another name of the article, upper and lower case alike.
"""

import functools
import random
from collections.abc import Iterator, Sequence

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol, tool_calls
from glm5_jax.environments.worlds.search import articles, index, questions, screen
from glm5_jax.environments.worlds.search import tools as tools_lib

PREFIX = "search:"
MAX_TURNS = 32
_MAX_WALKS = 5000  # tried for one question
_SPLITS = ("train", "held_out")
_MARKS = " *_`\"'"  # around an answer
_HELD_OUT = 8  # every 8th article is an answer of held-out questions alone
# Prints which of the paths have something in them.
_LOOK = """import os
for path in {}:
    if os.path.exists(path):
        size = len(os.listdir(path)) if os.path.isdir(path) else os.path.getsize(path)
        print(path if size else "")
"""
_TOLD = (
    "Answer the question with the tools. When you know the answer, reply with the "
    "title alone and call no tool."
)


class Search:
    """The taskset of a collection."""

    def __init__(self, name: str) -> None:
        """Reads and indexes the collection.

        Raises:
            config.InputError: there is no such collection, or no such walk.
        """
        self.name = name
        self._hops, collection = _parse(name)
        self._graph = articles.read(collection)
        self._index = _index(collection)
        self.places = articles.places(collection)

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the first good question of walks that the numbers begin.

        Raises:
            config.InputError: there is no such split, or the collection has no
                question in it.
        """
        if split not in _SPLITS:
            raise config.InputError(f"split must be one of {_SPLITS}, got {split!r}.")
        reasons: dict[str, int] = {}
        for question, reason in self.walks(split, seed, index):
            if question is not None and not reason:
                return self._task(question, f"{self.name}/{split}/{seed}/{index}")
            reasons[reason] = reasons.get(reason, 0) + 1
        raise config.InputError(
            f"{self.name} has no {split} question among {_MAX_WALKS} walks: {reasons}. "
            f"Choose a larger collection, or other numbers of links."
        )

    def walks(
        self, split: str, seed: int, index: int
    ) -> Iterator[tuple[questions.Question | None, str]]:
        """Yields questions and why each is dropped, "" for a good one."""
        rng = random.Random(f"{split}/{seed}/{index}")
        for _ in range(_MAX_WALKS):
            found = questions.walk(self._graph, rng, rng.randint(*self._hops))
            if isinstance(found, str):
                yield None, found
            elif (found.path[-1] % _HELD_OUT == 0) != (split == "held_out"):
                yield found, "of the other split"
            else:
                yield found, screen.flaw(self._graph, self._index, found)

    def environment(self) -> protocol.Environment:
        """Returns an environment with the four tools."""
        # A box sees /usr, where the dictionary is installed.
        hidden = tuple(path for path in self.places if path.is_relative_to("/usr"))
        tools = tools_lib.Tools(self._graph, self._index, hidden)
        return Environment(self._graph, tools)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns None: the results of calls are not known beforehand."""
        return None

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the walk with tools, and answers that must not be paid.

        Wrong are a name of each earlier article of the walk, the first guess of a
        reader who opens nothing (if it is not the answer), and a dump of titles.
        """
        question: questions.Question = task.answer["question"]
        titles = [self._graph.articles[n].title for n in question.path]
        calls = [tool_calls.turn("search", query=question.description[:400])]
        calls += [tool_calls.turn("open", page=title) for title in titles]
        guess = screen.guesses(self._graph, question)[:1]
        wrong = [*titles[:-1], *(self._graph.articles[n].title for n in guess)]
        wrong += ["; ".join(titles)]
        return proofs.Attempts(
            (*calls, _said(titles[-1])),
            tuple((calls[0], _said(title)) for title in wrong),
        )

    async def leaks(
        self, environment: protocol.Environment, task: protocol.Task
    ) -> list[str]:
        """Returns what the messages and the sandbox show of answer and collection."""
        assert isinstance(environment, Environment)
        number = task.answer["question"].path[-1]
        article = self._graph.articles[number]
        shown = {"messages": " ".join(m["content"] for m in task.messages)}
        look = tool_calls.turn(
            "python", code="import os; print(os.listdir('.'), *os.environ)"
        )
        shown["sandbox"] = (await environment.step(look)).messages[0]["content"]
        look = tool_calls.turn("python", code=_LOOK.format(list(map(str, self.places))))
        seen = (await environment.step(look)).messages[0]["content"]
        return [
            *(
                f"the answer in the {place}"
                for place, text in shown.items()
                if screen.names_in(text, article)
            ),
            *(f"the collection in {x}" for x in map(str, self.places) if x in seen),
        ]

    def _task(self, question: questions.Question, name: str) -> protocol.Task:
        answer = self._graph.articles[question.path[-1]]
        right = [n for n in answer.names if self._graph.find(n) == question.path[-1]]
        return protocol.Task(
            name,
            (
                {"role": "system", "content": _TOLD},
                {"role": "user", "content": question.text()},
            ),
            {"names": right, "question": question},
            tools_lib.TOOLS,
            tag=f"{question.hops}_links",
        )


class Environment:
    """An episode: calls are answered, a turn without a call is scored."""

    def __init__(self, graph: articles.Graph, tools: tools_lib.Tools) -> None:
        """Takes the articles, and the tools of the episode."""
        self._graph, self._tools = graph, tools
        self._right: int | None = None
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Returns the task's messages."""
        self._right = task.answer["question"].path[-1]
        self._num_turns = 0
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Returns the results of the turn's calls, or the reward if it has none."""
        self._num_turns += 1
        if not message.get("tool_calls"):
            _, said = messages.thought_and_content(message)
            return _ending(float(_meant(self._graph, said) == self._right), True)
        if self._num_turns >= MAX_TURNS:
            return _ending(0.0, False)
        results, _ = await tool_calls.answer(message, tools_lib.TOOLS, self._tools.run)
        return protocol.StepResult(results, None, False, False)

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._tools.close()


def _meant(graph: articles.Graph, answer: str) -> int | None:
    """Returns the article of a name, or of what is left without marks around it."""
    number = graph.find(answer)
    if number is None:
        text = articles.normalize(answer).removeprefix("answer:")
        number = graph.find(text.strip(_MARKS).removesuffix(".").strip(_MARKS))
    return number


@functools.cache
def _index(collection: str) -> index.Index:
    return index.Index(articles.read(collection))


def _parse(name: str) -> tuple[tuple[int, int], str]:
    """Returns the least and the most links, and the collection."""
    rest = name.removeprefix(PREFIX)
    collection, _, size = rest.rpartition(":")
    if not collection or not size.replace("-", "").isdigit():
        return (questions.MIN_HOPS, questions.MAX_HOPS), rest
    low, _, high = size.partition("-")
    hops = (int(low), int(high or low)) if low else (0, 0)
    if not questions.MIN_HOPS <= hops[0] <= hops[1] <= questions.MAX_HOPS:
        raise config.InputError(
            f"{name!r}: the links to walk must be from {questions.MIN_HOPS} to "
            f"{questions.MAX_HOPS}, as in {PREFIX}foldoc:2-4; got {size!r}."
        )
    return hops, collection


def _said(text: str) -> messages.Message:
    return {"role": "assistant", "content": text}


def _ending(score: float, is_over: bool) -> protocol.StepResult:
    reward = protocol.Reward(score, {"correct": score})
    return protocol.StepResult((), reward, is_over, not is_over)
