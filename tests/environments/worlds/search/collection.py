"""A collection of made-up articles for the tests, with links drawn at random."""

import json
import random

NUM_ARTICLES = 400
TAGS = ("ship", "river", "painter", "bridge", "village")
_SYLLABLES = ("ka", "lo", "mi", "ren", "tu", "vas", "zel", "dor", "phi", "gan")


def write(path):
    """Writes a file of JSON lines."""
    path.write_text("".join(f"{json.dumps(x)}\n" for x in records()), encoding="utf-8")
    return str(path)


def records():
    """Returns the articles: a sentence with rare words, a year, three links or so."""
    rng = random.Random(7)
    names = [f"{_word(rng)} {number}".capitalize() for number in range(NUM_ARTICLES)]
    found = []
    for name in names:
        rare = " ".join(_word(rng) for _ in range(8))
        a, b, c = (rng.choice(names) for _ in range(3))
        year = rng.randint(1850, 1999)
        text = f"{name} is known for {rare} near {{{a}}}. Since {year} it has {{{b}}}."
        text += f"\n\nSee also: {{{c}}}.\n\n(2001-02-03)"
        record = {"title": name, "text": text, "tags": [rng.choice(TAGS)]}
        found.append(record)
    return found


def _word(rng):
    return "".join(rng.choice(_SYLLABLES) for _ in range(3))
