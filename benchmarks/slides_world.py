"""Measures the judge of slides: verdicts against known labels, pages a second.

python benchmarks/slides_world.py [--num_each=10] [--first=1000000]
python benchmarks/slides_world.py --select=FILE.jsonl [--num_briefs=20] [--num_decks=4]
    [--least=0.9] [--base_url=URL --model=NAME | --error_rate=0.3]

Prints two lines of JSON and a table: of each flaw, the pages, how many lose reward
(caught), how many fail the rule that the flaw breaks (recall), and of all pages that
fail this rule, the share whose flaw breaks it (precision). A flaw may break other rules
as well: clipped text has no ink either.

--select plays decks instead, writes what of them SFT is to train on into the file, and
prints what became of the briefs; the author is a model, or a script that errs.
"""

import asyncio
import collections
import json
import pathlib
import time

import slides_decks
from absl import app, flags

from glm5_jax.environments import browser, endpoint
from glm5_jax.environments.worlds.slides import checks, flaws, labelled, measure, world

_NUM_EACH = flags.DEFINE_integer("num_each", 10, "Pages of each flaw.")
_FIRST = flags.DEFINE_integer("first", 1_000_000, "Number of the first brief.")
_SELECT = flags.DEFINE_string("select", "", "File of SFT lines to write.")
_NUM_BRIEFS = flags.DEFINE_integer("num_briefs", 20, "Briefs to play.")
_NUM_DECKS = flags.DEFINE_integer("num_decks", 4, "Decks of each brief.")
_NUM_PAGES = flags.DEFINE_integer("num_pages", 3, "Pages of a deck.")
_LEAST = flags.DEFINE_float("least", 0.9, "Score of a page that is trained on.")
_ERROR_RATE = flags.DEFINE_float("error_rate", 0.3, "Of the script's pages.")
_BASE_URL = flags.DEFINE_string("base_url", "", "Endpoint of the author.")
_MODEL = flags.DEFINE_string("model", "", "Name of the author there.")
_MAX_TOKENS = 16_384  # of a page


def main(argv: list[str]) -> None:
    """Judges the labelled pages, or selects from decks."""
    del argv
    if _SELECT.value:
        print(json.dumps(_select(), indent=2))
        return
    made = [*labelled.make(_NUM_EACH.value, _FIRST.value)]
    renderer = browser.Browser()
    began = time.perf_counter()
    found = asyncio.run(_judge(renderer, made))
    seconds = time.perf_counter() - began
    rates = asyncio.run(_rates(renderer, made[: 5 * _NUM_EACH.value]))
    renderer.close()
    sound = [v for one, v in zip(made, found, strict=True) if not one.flaw]
    flawed = [v for one, v in zip(made, found, strict=True) if one.flaw]
    caught = sum(verdict.score < 1 for verdict in flawed)
    blamed = sum(verdict.score < 1 for verdict in sound)
    figures = {
        "version": checks.version(),
        "pages": len(made),
        "flaws": len(flaws.ALL),
        "sound_pages_blamed": f"{blamed} of {len(sound)}",
        "flawed_pages_caught": f"{caught} of {len(flawed)}",
        "pages_a_second": round(len(made) / seconds, 1),
    }
    print(json.dumps(figures))
    print(json.dumps(rates))
    print("| flaw | rule | pages | caught | recall | precision |")
    print("|---|---|---|---|---|---|")
    for line in _table(made, found):
        print(line)


def _select() -> dict:
    taskset = world.Slides(f"slides:{_NUM_PAGES.value}")
    author = slides_decks.scripted(taskset, _ERROR_RATE.value)
    if _BASE_URL.value:
        asked = endpoint.ask(
            _BASE_URL.value, _MODEL.value, max_tokens=_MAX_TOKENS, temperature=1.0
        )
        author = lambda task, number: asked
    sizes = _NUM_BRIEFS.value, _NUM_DECKS.value, _LEAST.value
    path = pathlib.Path(_SELECT.value)
    try:
        return asyncio.run(slides_decks.select(taskset, author, *sizes, path))
    finally:
        taskset.close()


async def _judge(
    renderer: browser.Browser, made: list[labelled.Labelled]
) -> list[checks.Verdict]:
    return await asyncio.gather(
        *(checks.judge(renderer, one.html, one.page, one.images) for one in made)
    )


async def _rates(
    renderer: browser.Browser, made: list[labelled.Labelled]
) -> dict[str, float]:
    """Returns pages a second of the parts, one page at a time."""
    began = time.perf_counter()
    facts = [await measure.measure(renderer, x.html, x.images) for x in made]
    rendered = time.perf_counter()
    for one, fact in zip(made, facts, strict=True):
        checks.verdict(fact, one.page)
    ended = time.perf_counter()
    return {
        "rendered_a_second": round(len(made) / (rendered - began), 1),
        "judged_a_second": round(len(made) / (ended - rendered), 1),
    }


def _table(made: list[labelled.Labelled], found: list[checks.Verdict]) -> list[str]:
    """Returns a line for each flaw."""
    by_flaw: dict[str, list[checks.Verdict]] = collections.defaultdict(list)
    failing: dict[str, list[bool]] = collections.defaultdict(list)
    for one, verdict in zip(made, found, strict=True):
        by_flaw[one.flaw].append(verdict)
        broken = flaws.ALL[one.flaw].check if one.flaw else ""
        for rule in verdict.failed:
            failing[rule].append(rule == broken)
    lines = []
    for name, flaw in flaws.ALL.items():
        verdicts, rights = by_flaw[name], failing[flaw.check]
        caught = sum(verdict.score < 1 for verdict in verdicts)
        own = sum(flaw.check in verdict.failed for verdict in verdicts)
        precision = sum(rights) / len(rights) if rights else float("nan")
        lines.append(
            f"| {name} | {flaw.check} | {len(verdicts)} | {caught} | "
            f"{own / len(verdicts):.2f} | {precision:.2f} |"
        )
    return lines


if __name__ == "__main__":
    app.run(main)
