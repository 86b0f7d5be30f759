"""Tasks about settings: broken files, modes, times."""

import json
import random

from glm5_jax.environments.worlds.terminal.draft import Draft, Expect, names

_TABLE = "# m h dom mon dow command\n5 4 * * * /usr/bin/true\n"
_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def broken_ini(rng: random.Random) -> Draft:
    """Asks to mend a settings file that does not parse."""
    section, other, first, second = names(rng, 4)
    values = rng.sample(range(10, 99), 3)
    text = (
        f"[{section}\n{first} = {values[0]}\n{second}: {values[1]}\n"
        f"[{other}]\n{first} {values[2]}\n"
    )
    read = (
        "python3 -I -c 'import configparser; c = configparser.ConfigParser(); "
        'c.read_file(open("app.ini")); print({s: dict(c[s]) for s in c.sections()})\''
    )
    wanted = {
        section: {first: str(values[0]), second: str(values[1])},
        other: {first: str(values[2])},
    }
    close, equals = (
        f"s/^\\[{section}$/[{section}]/",
        f"s/^{first} \\([0-9]\\)/{first} = \\1/",
    )
    return Draft(
        instruction=(
            "app.ini is not read by Python's configparser: a section's title and one "
            "setting lack a sign. Mend the file; all names and values must stay."
        ),
        files={"app.ini": text},
        solution=f"sed -i -e '{close}' -e '{equals}' app.ini",
        wrong=(
            f"sed -i '{close}' app.ini",
            f"sed -i -e '{close}' -e '/^{first} [0-9]/d' app.ini",
            "echo > app.ini",
        ),
        expects=(Expect(read, str(wanted)),),
    )


def broken_json(rng: random.Random) -> Draft:
    """Asks to mend a JSON file that does not parse."""
    keys = names(rng, 4)
    value = {
        keys[0]: rng.randrange(99),
        keys[1]: [rng.randrange(9), "a, b"],
        keys[2]: {keys[3]: True},
    }
    lines = json.dumps(value, indent=2).split("\n")
    first = next(i for i, line in enumerate(lines) if keys[0] in line)
    lines[first] = lines[first].rstrip(",")
    lines[-2] = lines[-2] + ","
    read = "python3 -I -m json.tool --compact --sort-keys data.json"
    wanted = json.dumps(value, sort_keys=True, separators=(",", ":"))
    comma = f"sed -i -e '{first + 1}s/$/,/'"
    last = f"-e '{len(lines) - 1}s/,$//'"
    return Draft(
        instruction=(
            "data.json does not parse: one comma is missing and one is too many. Mend "
            "it; all keys and values must stay."
        ),
        files={"data.json": "\n".join(lines) + "\n"},
        solution=f"{comma} {last} data.json",
        wrong=(
            f"{comma} data.json",
            "echo '{}' > data.json",
            f"{comma} {last} data.json; sed -i 's/a, b/a b/' data.json",
        ),
        expects=(Expect(read, wanted),),
    )


def modes(rng: random.Random) -> Draft:
    """Asks for modes of files by their kind."""
    scripts, secrets, plain = names(rng, 3), names(rng, 2), names(rng, 2)
    files = {f"app/{name}.sh": "#!/bin/sh\n" for name in scripts}
    files |= {f"app/keys/{name}.pem": "secret\n" for name in secrets}
    files |= {f"app/{name}.txt": "text\n" for name in plain}
    mode = {".sh": "755", "pem": "600", "txt": "644"}
    wanted = "\n".join(sorted(f"{path} {mode[path[-3:]]}" for path in files))
    change = (
        "find app -name '*.sh' -exec chmod 755 {} +; find app -name '*.txt' -exec "
        "chmod 644 {} +; find app -name '*.pem' -exec chmod 600 {} +"
    )
    return Draft(
        instruction=(
            "Below app, set the mode of every .sh file to rwxr-xr-x, of every .pem "
            "file to rw------- and of every .txt file to rw-r--r--."
        ),
        files=files,
        setup="find app -type f -exec chmod 640 {} +",
        solution=change,
        wrong=(
            change.replace("600", "640"),
            "chmod -R 755 app",
            change.replace("find app -name '*.pem'", "find app/keys -name '*.key'"),
        ),
        expects=(
            Expect("find app -type f -printf '%p %m\\n' | LC_ALL=C sort", wanted),
        ),
    )


def cron_line(rng: random.Random) -> Draft:
    """Asks for a line of a table of times."""
    hour, minute, day = rng.randrange(1, 24), rng.randrange(1, 60), rng.randrange(7)
    month, command = rng.randrange(1, 13), f"/usr/local/bin/{names(rng, 1)[0]}"
    kind = rng.choice(["weekly", "monthly", "steps", "yearly"])
    fields, said = {
        "weekly": (
            f"{minute} {hour} * * {day}",
            f"every {_DAYS[day]} at {hour:02}:{minute:02}",
        ),
        "monthly": (
            f"{minute} {hour} {day + 3} * *",
            f"on day {day + 3} of every month at {hour:02}:{minute:02}",
        ),
        "steps": (f"*/15 {hour} * * *", f"every 15 minutes of the hour {hour}"),
        "yearly": (
            f"{minute} {hour} {day + 1} {month} *",
            f"on day {day + 1} of month {month} at {hour:02}:{minute:02}",
        ),
    }[kind]
    swapped = " ".join([fields.split()[1], fields.split()[0], *fields.split()[2:]])
    if swapped == fields:
        swapped = f"0 0 {fields.split(maxsplit=2)[2]}"
    return Draft(
        instruction=(
            f"Append to the file crontab the line of a user's table that runs "
            f"{command} {said}. Use numbers, and no names of days or months; "
            f"the lines that are there must stay."
        ),
        files={"crontab": _TABLE},
        solution=f"echo '{fields} {command}' >> crontab",
        wrong=(
            f"echo '{swapped} {command}' >> crontab",
            f"echo '{fields} {command}' > crontab",
            f"echo '{fields} root {command}' >> crontab",
        ),
        expects=(
            Expect(
                "head -n 2 crontab; tail -n +3 crontab | xargs -L 1 -d '\\n' echo | "
                "sed 's/  */ /g'",
                f"{_TABLE}{fields} {command}",
            ),
        ),
    )
