"""Tasks about text: logs, tables, and words in many files."""

import collections
import random

from glm5_jax.environments.worlds.terminal.draft import Draft, Expect, answer, names


def access_log(rng: random.Random) -> Draft:
    """Asks for the address with most answers of a kind in a server's log."""
    status = rng.choice([404, 500, 503])
    hosts = [f"10.0.{rng.randrange(9)}.{n}" for n in rng.sample(range(2, 250), 6)]
    lines, failed = [], collections.Counter()
    for minute in range(rng.randrange(60, 120)):
        host, code = rng.choice(hosts), rng.choice([200, 200, 301, status])
        size = rng.choice([status, rng.randrange(90, 9000)])  # the code as a size, too
        failed[host] += code == status
        clock = f"{minute // 60:02}:{minute % 60:02}:00"
        lines.append(
            f'{host} [{clock}] "GET /{rng.choice(names(rng, 3))}" {code} {size}'
        )
    worst, most = failed.most_common(1)[0]
    host = next(h for h in hosts if h != worst)
    while sum(count == most for count in failed.values()) > 1:
        lines.append(f'{worst} [23:00:00] "GET /" {status} 1')
        failed[worst] += 1
        most += 1
    awk = f"awk '$5 == {status} {{print $1}}' access.log | sort | uniq -c | sort -rn"
    return Draft(
        instruction=(
            f'access.log has lines of the form ADDRESS [TIME] "GET PATH" STATUS SIZE. '
            f"Write into answer.txt the address with most answers of status {status}, "
            f"a space, and their number."
        ),
        files={"access.log": "\n".join(lines) + "\n"},
        solution=f"{awk} | awk 'NR == 1 {{print $2, $1}}' > answer.txt",
        wrong=(
            "cut -d' ' -f1 access.log | sort | uniq -c | sort -rn > answer.txt",
            f"echo {worst} > answer.txt",
            f"echo {host} {most} > answer.txt",
        ),
        expects=answer(f"{worst} {most}"),
    )


def column_sums(rng: random.Random) -> Draft:
    """Asks for the sums of a column of a table by another one."""
    regions = names(rng, 4)
    rows = [(rng.choice(regions), rng.randrange(1, 400)) for _ in range(40)]
    totals = collections.Counter()
    for region, amount in rows:
        totals[region] += amount
    header, wanted = "id,region,note,amount", sorted(totals.items())
    body = [
        f"{number},{region},{rng.choice(regions)} {rng.randrange(9)},{amount}"
        for number, (region, amount) in enumerate(rows, 1)
    ]
    text = "\n".join(f"{region} {total}" for region, total in wanted)
    sums = "{s[$2] += $4} END {for (r in s) print r, s[r]}"
    return Draft(
        instruction=(
            "sales.csv has a header and the columns id, region, note and amount. Write "
            "into answer.txt a line for each region, its name, a space and the sum of "
            "its amounts, sorted by name."
        ),
        files={"sales.csv": "\n".join([header, *body]) + "\n"},
        solution=f"tail -n +2 sales.csv | awk -F, '{sums}' | sort > answer.txt",
        wrong=(
            f"awk -F, '{sums}' sales.csv | sort > answer.txt",
            f"tail -n +2 sales.csv | awk -F, '{sums}' | sort -r > answer.txt",
            "tail -n +2 sales.csv | cut -d, -f2 | sort | uniq -c > answer.txt",
        ),
        expects=answer(text),
    )


def rename_key(rng: random.Random) -> Draft:
    """Asks to rename a key in all settings, and nothing that only looks like it."""
    old, new, other = names(rng, 3)
    folders = names(rng, 3)
    files = {}
    for number, folder in enumerate(folders):
        lines = [f"{old} = {rng.randrange(99)}", f"{old}_max = 1", f"# {old} is old"]
        rng.shuffle(lines)
        files[f"conf/{folder}/{number}.conf"] = (
            "\n".join([f"{other} = 2", *lines]) + "\n"
        )
    files["conf/README.md"] = f"Set {old} = 1 in a .conf file.\n"
    wanted = {
        path: "\n".join(
            line.replace(f"{old} = ", f"{new} = ") if path.endswith(".conf") else line
            for line in text.split("\n")
        )
        for path, text in files.items()
    }
    every = f"find conf -name '*.conf' -exec sed -i 's/^{old} = /{new} = /' {{}} +"
    return Draft(
        instruction=(
            f"Rename the key {old} to {new} in every .conf file below conf, where it "
            f"stands at the start of a line before ' = '. Keys with longer names, "
            f"comments and other files must stay as they are."
        ),
        files=files,
        solution=every,
        wrong=(
            f"grep -rl {old} conf | xargs sed -i 's/{old}/{new}/g'",
            f"sed -i 's/^{old} = /{new} = /' conf/{folders[0]}/*.conf",
            every.replace("'*.conf'", "'*'").replace(f"^{old} =", f"{old} ="),
        ),
        expects=tuple(Expect(f"cat {path}", text) for path, text in wanted.items()),
    )
