"""The world of front-end tasks: pages and projects for a brief, judged by a checklist.

The reward is the oracle's (oracle.py): 1 if every item of the checklist passes.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import browser, proofs, protocol, tool_calls
from glm5_jax.environments.worlds.frontend import draft, families, oracle, traces
from glm5_jax.environments.worlds.frontend.projects import build, frameworks, kit

MAX_TURNS = 20
_MOST_BYTES = 200_000  # of a submission
# Of a checklist after its first failure, which decides the reward: all of it ends
# within `rl.step_timeout_seconds`, after which an episode has no reward.
_SECONDS_TO_FAIL = 20.0
_HELD_OUT = 5  # one brief in so many
_WRITE = tool_calls.schema(
    "write",
    "Writes a file; what it was before is gone.",
    path="Its path, such as index.html.",
    content="All of it.",
)
_SUBMIT = tool_calls.schema(
    tool_calls.SUBMIT, "Ends the task: the page is tested as it is."
)
_BUILD = tool_calls.schema(
    "build", "Builds the project by npm run build, and returns the end of what it says."
)
SCHEMAS = (_WRITE, _SUBMIT)
PROJECT_SCHEMAS = (_WRITE, _BUILD, _SUBMIT)
_ASKED = (
    "Write a page, index.html, with scripts of its own and no library, by write(path, "
    "content); other files may lie beside it. Names with # are ids of elements. Texts "
    "in quotes are word for word.\n\n{brief}\n\nsubmit() ends."
)
_ASKED_PROJECT = (
    "Write {component}, the component of a page, for a project of {title} and Vite, by "
    "write(path, content); other modules may lie beside it. package.json, "
    "vite.config.js, index.html and {entry}, which mounts the component at {root}, are "
    "there; of packages there are {packages}. build() runs npm run build. Names with # "
    "are ids of elements, those with a dot are classes. Texts in quotes are word for "
    "word.\n\n{brief}\n\nsubmit() ends."
)


class Frontend:
    """Tasks of several families in turn, or of one.

    "frontend" has all pages, "frontend:react" and "frontend:vue" all projects of a
    framework, "frontend:quiz" and "frontend:react_board" are one family.
    """

    def __init__(self, name: str) -> None:
        """Finds the browser; it starts with the first submission.

        Raises:
            config.InputError: there is no such family, or no browser; or projects
                cannot be built here.
        """
        self.name = name
        self.families = _families(name)
        self.browser = browser.Browser()
        is_of_projects = not {*self.families} <= {*families.ALL}
        if is_of_projects and (reason := kit.missing()):
            raise config.InputError(f"{name!r} cannot be built here: {reason}")

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; a hash of its brief decides which split it is in."""
        turn, place = divmod(index, len(self.families))
        family = self.families[place]
        rng = random.Random(f"{split}/{seed}/{family}/{turn}")
        while True:
            number = rng.randrange(2**31)
            made = traces.draft(family, number)
            if _is_held_out(made.brief) == (split == "held_out"):
                break
        return protocol.Task(
            id=f"{family}/{number}",
            messages=({"role": "user", "content": _asked(made)},),
            answer=(family, number),
            tools=PROJECT_SCHEMAS if made.framework else SCHEMAS,
            tag=family,
            problem=f"{made.framework}\n{made.brief}",
        )

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode(self.browser)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the task and the turns that write the reference."""
        return (*task.messages, *self.attempts(task).right)

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the turns of the reference, and of its flawed versions."""
        made = traces.draft(*task.answer)
        right, *wrong = (_turns(made, text) for text in made.submissions().values())
        return proofs.Attempts(right, tuple(wrong))

    def close(self) -> None:
        """Ends the browser."""
        self.browser.close()


class Episode:
    """An episode: files that are written, and tested at the end."""

    def __init__(self, renderer: browser.Browser) -> None:
        """Takes the browser that tests the page."""
        self._renderer = renderer
        self._made: draft.Draft | None = None
        self._files: dict[str, str] = {}
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Begins without files, or with those around a project's component."""
        self._made = traces.draft(*task.answer)
        if self._made.framework:
            self._files = frameworks.ALL[self._made.framework].files()
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Runs the turn's calls; submit, or a turn without calls, ends the episode."""
        self._num_turns += 1
        made = self._task()
        tools = PROJECT_SCHEMAS if made.framework else SCHEMAS
        results, is_over = await tool_calls.answer(message, tools, self._use)
        is_over |= not message.get("tool_calls")
        if is_over or self._num_turns >= MAX_TURNS:
            return await self._score(is_cut=not is_over)
        return protocol.StepResult(results, None, False, False)

    async def close(self) -> None:
        """Drops the files."""
        self._files.clear()

    def _task(self) -> draft.Draft:
        assert self._made is not None, "an episode is reset before its first step"
        return self._made

    async def _use(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "build":
            return (await build.build(self._files)).log
        made, path = self._task(), arguments["path"].removeprefix("./")
        parts = path.split("/")
        if {"", ".", ".."} & {*parts} or parts[0] in build.FOLDERS:
            raise tool_calls.CallError(f"{path!r} cannot be written.")
        if made.framework and not _is_free(path, frameworks.ALL[made.framework]):
            raise tool_calls.CallError(
                f"{path!r} cannot be written: the files of the beginning stay, others "
                "lie in src/ or public/."
            )
        others = [old for at, old in self._files.items() if at != path]
        texts = [*others, arguments["content"]]
        if sum(len(text.encode()) for text in texts) > _MOST_BYTES:
            raise tool_calls.CallError(f"all files have at most {_MOST_BYTES} bytes.")
        self._files[path] = arguments["content"]
        return f"wrote {path}"

    async def _score(self, *, is_cut: bool) -> protocol.StepResult:
        """Decides the checklist."""
        made = self._task()
        info: dict[str, Any] = {}
        if made.framework:
            built = await build.build(self._files)
            files, info["build"] = built.files, built.log
        else:
            files = {path: text.encode() for path, text in self._files.items()}
        decided = oracle.decide(
            self._renderer, files, made.items, made.framework, _SECONDS_TO_FAIL
        )
        builds, passed = await decided
        parts = {
            "builds": float(builds),
            "checklist": sum(passed.values()) / len(passed),
        }
        reward = protocol.Reward(float(all(passed.values())), parts)
        info["failed"] = [name for name, is_good in passed.items() if not is_good]
        return protocol.StepResult((), reward, not is_cut, is_cut, info)


def _is_free(path: str, framework: frameworks.Framework) -> bool:
    """Returns whether a file of a project is the agent's.

    Others decide how it is built and mounted, also settings of npm and packages that
    lie beside a module.
    """
    first, *rest = path.split("/")
    is_inside = first in ("src", "public") and build.FOLDERS[0] not in rest
    return is_inside and path not in framework.files()


def _families(name: str) -> Sequence[str]:
    """Returns the families of a taskset.

    Raises:
        config.InputError: there is none of the name.
    """
    wanted = name.partition(":")[2]
    known = {**families.ALL, **families.PROJECTS}
    if not wanted:
        return sorted(families.ALL)
    if wanted in frameworks.ALL:
        return [key for key in families.PROJECTS if key.startswith(f"{wanted}_")]
    if wanted not in known:
        raise config.InputError(
            f"{name!r}: there is no family {wanted!r}; there are "
            f"{', '.join(sorted([*known, *frameworks.ALL]))}."
        )
    return [wanted]


def _asked(made: draft.Draft) -> str:
    """Returns the message of a task."""
    if not made.framework:
        return _ASKED.format(brief=made.brief)
    framework = frameworks.ALL[made.framework]
    return _ASKED_PROJECT.format(
        component=framework.component,
        title=framework.title,
        entry=framework.entry[0],
        root=framework.root,
        packages=", ".join(f"{k} {v}" for k, v in framework.versions.items()),
        brief=made.brief,
    )


def _turns(made: draft.Draft, text: str) -> tuple[messages.Message, ...]:
    """Returns the turns that submit a page or a component."""
    path = "index.html"
    if made.framework:
        path = frameworks.ALL[made.framework].component
    written = tool_calls.turn("write", path=path, content=text)
    return (written, tool_calls.turn(tool_calls.SUBMIT))


def _is_held_out(brief: str) -> bool:
    """Returns whether it is; two frameworks share a brief."""
    digest = hashlib.sha256(brief.encode()).digest()
    return digest[0] % _HELD_OUT == 0
