"""The world of chains: issues of successive releases, solved on one tree.

The agent starts from the first release without tests. After it submits, its files are
scored by the hidden tests of that link's release, as in the world of single tasks, and
the next issue is given; its own files stay. The reward is the share of the links that
were solved when they were submitted.
"""

import functools
from collections.abc import Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import listed, proofs, protocol, tool_calls
from glm5_jax.environments.worlds.swe import (
    attempts,
    copies,
    records,
    statements,
    tools,
    world,
)
from glm5_jax.environments.worlds.swe.chain import stored

PREFIX = "swe_chain:"
MAX_TURNS = world.MAX_TURNS  # for each link, in the sum
_INSTRUCTION = (
    "The package is in {home}; its tests are not. There are {count} issues, one after "
    "the other: change the source with the tools, then call submit, and the next issue "
    "is given. Your files stay as you left them. Hidden tests decide after each; edits "
    "of tests do not count.\n\nIssue 1 of {count}:\n\n"
)
_NEXT = "Issue {number} of {count}, on the package as you left it:\n\n"
_TOO_LATE = "error: nothing is done in a turn after submit."


class SweChain(listed.Listed[stored.Chain]):
    """The chains of a folder that was mined."""

    def __init__(self, name: str) -> None:
        """Reads the chains of "swe_chain:FOLDER".

        Raises:
            config.InputError: the folder has no chains.
        """
        self.folder = records.Folder(name.removeprefix(PREFIX))
        by_id = stored.read(self.folder)
        # Chains of one package are in one split.
        repos = {key: chain.repo for key, chain in by_id.items()}
        super().__init__(
            name,
            by_id,
            world.HELD_OUT,
            "mine more packages",
            groups=repos,
            proofs=self.folder.path / listed.PROOFS,
        )

    def task_of(self, chain: stored.Chain) -> protocol.Task:
        """Returns the task of a chain."""
        first, count = chain.links[0], len(chain.links)
        told = _INSTRUCTION.format(home=tools.HOME, count=count)
        said = {"role": "user", "content": told + first.problem_statement}
        return protocol.Task(
            id=chain.chain_id,
            messages=(said,),
            answer=chain.chain_id,
            tools=tools.SCHEMAS,
            tag=f"{count} links",
        )

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the solution of all links, cheats, and the solutions of some."""
        links = self.by_id[task.answer].links
        solutions = [attempts.right(self.folder, link) for link in links]
        right = [turn for turns in solutions for turn in turns]
        rest = (proofs.NOTHING,) * (len(links) - 1)
        partial = [_first(solutions, count) for count in range(1, len(links))]
        # The first issue is solved together with the second one, too late.
        late = (proofs.NOTHING, *solutions[0][:-1], *right[len(solutions[0]) :])
        return proofs.Attempts(
            right,
            tuple((*turns, *rest) for turns in attempts.wrong(self.folder, links[0])),
            (*partial, (late, (len(links) - 1) / len(links))),
        )

    def scored_by(self, task: protocol.Task) -> str:
        """Returns what decides about each link."""
        links = self.by_id[task.answer].links
        return "".join(world.scored_by(self.folder, link) for link in links)

    async def leaks(
        self, environment: protocol.Environment, task: protocol.Task
    ) -> Sequence[str]:
        """Returns what an agent could read of the links to come, at each of them."""
        assert isinstance(environment, Environment)
        links = self.by_id[task.answer].links
        found: list[str] = []
        for number, link in enumerate(links):
            told = links[: number + 1]
            for later in links[number:]:
                found += statements.leaks(link.problem_statement, later)
            known = {t for one in told for t in self.folder.agent_tree(one).values()}
            secret = {
                (path, text)
                for later in links[number:]
                for path, text in copies.secrets(self.folder, later).items()
                if text not in known
            }
            found += await environment.search(attempts.look(secret))
            for turn in attempts.right(self.folder, link):
                await environment.step(turn)
        return found

    def environment(self) -> "Environment":
        """Returns an environment for one episode."""
        return Environment(self)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the issues, each with its solution as calls."""
        links = self.by_id[task.answer].links
        shown = [*task.messages, *attempts.right(self.folder, links[0])]
        for number, link in enumerate(links[1:], 2):
            submit = shown[-1]["tool_calls"][0]
            shown.append(tool_calls.result(submit, _issue(link, number, len(links))))
            shown += attempts.right(self.folder, link)
        return shown


class Environment:
    """An episode in a sandbox of its own."""

    def __init__(self, taskset: SweChain, max_turns: int = MAX_TURNS) -> None:
        """Makes an environment that cuts off an episode after `max_turns` a link."""
        self._world, self._turns_a_link = taskset, max_turns
        self._box: Any = None
        self._links: tuple[records.Record, ...] = ()
        self._solved: list[float] = []  # of each link that was submitted
        self._problems: dict[str, str] = {}
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Opens the sandbox and returns the task's messages."""
        self._links = self._world.by_id[task.answer].links
        self._solved, self._problems, self._num_turns = [], {}, 0
        self._box = await world.open_box(self._world.folder, self._links)
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Returns the results of the turn's calls, the next issue, or the reward."""
        self._num_turns += 1
        run = functools.partial(tools.run, self._box)
        results, is_over = await tool_calls.answer(message, tools.SCHEMAS, run)
        is_over |= not message.get("tool_calls")
        is_cut = self._num_turns >= self._turns_a_link * len(self._links)
        if not is_over and not is_cut:
            return protocol.StepResult(results, None, False, False)
        await self._score()
        if is_cut or len(self._solved) == len(self._links):
            return self._end()
        await self._box.run(f"cd {tools.HOME}")  # in the shell that scoring began
        return protocol.StepResult(
            (*results, *self._next(message, len(results))), None, False, False
        )

    async def search(self, command: str) -> list[str]:
        """Returns the lines of a command in the agent's sandbox; it is no turn."""
        return await tools.search(self._box, command)

    async def close(self) -> None:
        """Removes the sandbox."""
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()

    async def _score(self) -> None:
        """Scores the link under way on a fresh copy of the agent's files."""
        folder, number = self._world.folder, len(self._solved)
        link = self._links[number]
        files = await world.read_tree(self._box, folder.agent_tree(link))
        reward, problem = await world.score(folder, link, files)
        self._solved.append(reward.total)
        if problem:
            self._problems[f"link_{number + 1}"] = problem

    def _end(self) -> protocol.StepResult:
        count = len(self._links)
        missing = [0.0] * (count - len(self._solved))
        parts = {
            f"link_{number}": solved
            for number, solved in enumerate([*self._solved, *missing], 1)
        }
        total = sum(self._solved) / count
        reward = protocol.Reward(total, {"solved": float(total == 1.0), **parts})
        is_cut = bool(missing)
        return protocol.StepResult((), reward, not is_cut, is_cut, self._problems)

    def _next(
        self, message: messages.Message, num_done: int
    ) -> tuple[messages.Message, ...]:
        """Returns the next issue, as the result of submit if that was called."""
        number = len(self._solved) + 1
        told = _issue(self._links[number - 1], number, len(self._links))
        calls = (message.get("tool_calls") or ())[num_done:]
        if not calls:
            return ({"role": "user", "content": told},)
        rest = (tool_calls.result(call, _TOO_LATE) for call in calls[1:])
        return (tool_calls.result(calls[0], told), *rest)


def _first(solutions: Sequence[proofs.Turns], count: int) -> tuple[proofs.Turns, float]:
    """Returns the turns that solve the first links alone, and what they earn."""
    turns = [turn for solution in solutions[:count] for turn in solution]
    nothing = [proofs.NOTHING] * (len(solutions) - count)
    return (*turns, *nothing), count / len(solutions)


def _issue(link: records.Record, number: int, count: int) -> str:
    told = _NEXT.format(number=number, count=count)
    return told + link.problem_statement
