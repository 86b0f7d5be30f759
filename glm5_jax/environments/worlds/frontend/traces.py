"""Judged submissions on disk, and their verification without a model.

A folder has traces.jsonl, a line for each submission with its files, truth, and every
message of its judge, and pictures/ with the screenshots by their digests.
"""

import dataclasses
import json
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import browser, tool_calls
from glm5_jax.environments.worlds.frontend import draft as draft_lib
from glm5_jax.environments.worlds.frontend import families, judge, oracle, rates
from glm5_jax.environments.worlds.frontend.projects import build, frameworks


@dataclasses.dataclass(frozen=True)
class Trace:
    """A judged submission.

    Attributes:
        family: of the task.
        number: of the task.
        submission: its name.
        files: texts by path, those that a browser opens.
        builds: whether it opens.
        truth: of each item, by the oracle.
        judgements: of the items.
    """

    family: str
    number: int
    submission: str
    files: dict[str, str]
    builds: bool
    truth: dict[str, bool]
    judgements: tuple[judge.Judgement, ...]

    def instance(self) -> rates.Instance:
        """Returns what rates are computed from."""
        verdicts = {one.item: bool(one.verdict) for one in self.judgements}
        task = f"{self.family}/{self.number}"
        return rates.Instance(task, self.builds, self.truth, verdicts or None)


def draft(family: str, number: int) -> draft_lib.Draft:
    """Returns a family's task of a number."""
    make = {**families.ALL, **families.PROJECTS}[family]
    return make(random.Random(f"{family}/{number}"))


async def site(made: draft_lib.Draft, text: str) -> dict[str, bytes]:
    """Returns the files that a browser opens of a submission; none if it is not built.

    Args:
        made: the task.
        text: one of its submissions.

    Raises:
        config.InputError: projects cannot be built here.
    """
    if not made.framework:
        return {"index.html": text.encode()}
    framework = frameworks.ALL[made.framework]
    files = {**framework.files(), framework.component: text}
    return {**(await build.build(files)).files}


def write(folder: pathlib.Path, found: Sequence[Trace]) -> None:
    """Writes traces into a new folder."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    lines = []
    for trace in found:
        for one in trace.judgements:
            for digest, png in one.pictures.items():
                (pictures / f"{digest}.png").write_bytes(png)
        judgements = [
            {"item": one.item, "verdict": one.verdict, "history": one.history}
            for one in trace.judgements
        ]
        names = ("family", "number", "submission", "files", "builds", "truth")
        record = {name: getattr(trace, name) for name in names}
        lines.append(json.dumps({**record, "judgements": judgements}))
    text = "".join(f"{line}\n" for line in lines)
    (folder / "traces.jsonl").write_text(text, encoding="utf-8")


def read(folder: pathlib.Path) -> Iterator[Trace]:
    """Yields the traces of a folder, without their pictures."""
    for line in (folder / "traces.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        judgements = tuple(
            judge.Judgement(one["item"], one["verdict"], tuple(one["history"]), {})
            for one in record.pop("judgements")
        )
        yield Trace(**record, judgements=judgements)


async def verify(renderer: browser.Browser, trace: Trace) -> list[str]:
    """Plays a trace again, without its judge; returns what is different now.

    The oracle decides every item anew. Every call of the judge is made again on the
    stored files: results and verdict must be the same. Pixels of screenshots may
    differ between machines and are not compared.

    Args:
        renderer: the browser.
        trace: to play.
    """
    files = {path: text.encode() for path, text in trace.files.items()}
    made = draft(trace.family, trace.number)
    decided = oracle.decide(renderer, files, made.items, made.framework)
    builds, truth = await decided
    found = [] if builds == trace.builds else ["the build"]
    found += [f"truth of {name}" for name in truth if truth[name] != trace.truth[name]]
    hands = judge.Hands(renderer, files)
    try:
        for one in trace.judgements:
            found += await _replayed(hands, one)
    finally:
        await hands.close()
    return found


async def _replayed(hands: judge.Hands, one: judge.Judgement) -> list[str]:
    """Returns what is different when the judge's calls are made again."""
    hands.begin()
    tools = (*judge.TOOLS, judge.SCREENSHOT)
    told: list[messages.Message] = []
    for message in one.history:
        if message["role"] == "assistant":
            told += (await tool_calls.answer(message, tools, hands.use))[0]
    before = [m["content"] for m in one.history if m["role"] == "tool"]
    after = [message["content"] for message in told]
    found = []
    if [*map(_without_pixels, before)] != [*map(_without_pixels, after)]:
        found.append(f"results that the judge of {one.item} saw")
    if hands.verdict != one.verdict:
        found.append(f"verdict on {one.item}")
    return found


def _without_pixels(text: Any) -> Any:
    return "screenshot" if str(text).startswith("screenshot ") else text
