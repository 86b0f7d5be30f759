"""Measures the judge of slides: verdicts against known labels, pages a second.

python benchmarks/slides_world.py [--num_each=10] [--first=1000000]

Prints two lines of JSON and a table: of each flaw, the pages, how many lose reward
(caught), how many fail the rule that the flaw breaks (recall), and of all pages that
fail this rule, the share whose flaw breaks it (precision). A flaw may break other rules
as well: clipped text has no ink either.
"""

import asyncio
import collections
import json
import time

from absl import app, flags

from glm5_jax.environments import browser
from glm5_jax.environments.worlds.slides import checks, flaws, labelled, measure

_NUM_EACH = flags.DEFINE_integer("num_each", 10, "Pages of each flaw.")
_FIRST = flags.DEFINE_integer("first", 1_000_000, "Number of the first brief.")


def main(argv: list[str]) -> None:
    """Judges the labelled pages."""
    del argv
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
