"""Tasks whose result is a program: checks give it inputs that the agent never saw."""

import random

from glm5_jax.environments.worlds.terminal.draft import Draft, Expect, names


def makefile(rng: random.Random) -> Draft:
    """Asks to mend a Makefile so that it rebuilds what has changed."""
    first, second, target = sorted(names(rng, 3), reverse=True)  # sorting changes them
    upper = rng.choice(["tr a-z A-Z", "rev", "sort"])
    text = (
        f"{target}.txt: {first}.txt\n"
        f"        cat {first}.txt {second}.txt | {upper} > {target}.txt\n"
    )
    fixed = (
        f"printf '{target}.txt: {first}.txt {second}.txt\\n\\tcat {first}.txt "
        f"{second}.txt | {upper} > {target}.txt\\n' > Makefile"
    )
    build = f"make -s {target}.txt && cat {target}.txt"
    lines = [f"{first} 2", f"{second} 1"]
    shown = {
        "tr a-z A-Z": lambda x: [line.upper() for line in x],
        "rev": lambda x: [line[::-1] for line in x],
        "sort": sorted,
    }[upper]
    changed = [lines[0], "later 9"]
    again = f"sleep 0.02; echo 'later 9' > {second}.txt; {build}"
    return Draft(
        instruction=(
            f"make does not accept the Makefile, whose recipe is indented by blanks, "
            f"and it would not rebuild {target}.txt after a change of {second}.txt. "
            f"Mend both; the recipe must stay the same."
        ),
        files={
            "Makefile": text,
            f"{first}.txt": lines[0] + "\n",
            f"{second}.txt": lines[1] + "\n",
        },
        solution=fixed,
        wrong=(
            "sed -i 's/^        /\\t/' Makefile",
            fixed.replace(f" | {upper}", ""),
            f"sed -i 's/: {first}.txt/: {first}.txt {second}.txt/' Makefile",
        ),
        expects=(
            Expect(f"rm -f {target}.txt; {build}", "\n".join(shown(lines))),
            Expect(again, "\n".join(shown(changed))),
        ),
    )


def script_words(rng: random.Random) -> Draft:
    """Asks for a script that counts words in some way."""
    kind = rng.choice(["different", "longest", "twice"])
    tail = {
        "different": "sort -u | wc -l",
        "longest": "awk '{print length($0)}' | sort -n | tail -1",
        "twice": "sort | uniq -d | wc -l",
    }
    said = {
        "different": "the number of different words",
        "longest": "the number of letters of the longest word",
        "twice": "the number of words that occur more than once",
    }
    split = "cat \"$1\" | tr -s '[:space:]' '\\n' | grep ."

    def write(pipe: str) -> str:
        line = f"{split} | {pipe}"
        quoted = line.replace("'", "'\\''")
        return f"printf '%s\\n' '#!/bin/sh' '{quoted}' > count.sh; chmod +x count.sh"

    expects = []
    for number in range(3):
        words = [rng.choice(names(rng, 6)) for _ in range(rng.randrange(5, 20))]
        words += [words[0], f"once{number}"]
        wanted = {
            "different": len({*words}),
            "longest": max(map(len, words)),
            "twice": sum(words.count(w) > 1 for w in {*words}),
        }[kind]
        text = "  ".join(words[:3]) + "\\n\\n" + " ".join(words[3:])
        path = f"/tmp/a {number}"
        command = f"printf '{text}\\n' > '{path}'; ./count.sh '{path}'"
        expects.append(Expect(command, str(wanted)))
    others = [name for name in tail if name != kind]
    return Draft(
        instruction=(
            f"Write an executable script count.sh that takes the path of a text and "
            f"prints {said[kind]} in it, and nothing else. Words are separated by "
            f"blanks and line feeds; a path may have blanks."
        ),
        files={"example.txt": "one two  two\n\nthree\n"},
        solution=write(tail[kind]),
        wrong=(
            write(tail[others[0]]),
            write(tail[others[1]]),
            write(tail[kind]).replace("; chmod +x count.sh", ""),
            write(tail[kind]).replace('"$1"', "$1"),
        ),
        expects=tuple(expects),
    )
