"""Writes a mined task as a folder of Harbor's format, which Docker can build too.

environment/files/   the package as the agent gets it, at /work/repo
solution/            fix.patch, and solve.sh that applies it
tests/               scored.py with what it reads: hidden/, task.json, tools.zip
wrong/N.sh           the cheats of attempts.py
"""

import hashlib
import io
import json
import pathlib
import re
import shlex
import zipfile
from collections.abc import Mapping

from glm5_jax import config, messages
from glm5_jax.environments.harbor import folder as harbor
from glm5_jax.environments.worlds.swe import (
    attempts,
    copies,
    diffs,
    drivers,
    kinds,
    parsers,
    recipes,
    records,
    runners,
    scored,
    tools,
    trials,
)

_DOCKERFILE = """FROM debian:bookworm
RUN apt-get update && apt-get install -y --no-install-recommends \\
    {packages} && rm -rf /var/lib/apt/lists/*
COPY files {home}
{tools}WORKDIR {home}
"""
_TOOLS = "tools.zip"
_TOOLS_AT = f"/opt/{_TOOLS}"
_INSTRUCTION = (
    "The package is in {home}; its tests are not. Change its source. Hidden tests "
    "decide. Edits of tests do not count.\n\n"
)
_LIBRARY = "library"  # below tests/
_TEST = f"""#!/bin/bash
# Puts the agent's files over a fresh copy of the package and runs the hidden tests.
cd /
exec python3 -I -c "import sys; sys.path.insert(0, '/tests/{_LIBRARY}')
from glm5_jax.environments.worlds.swe import scored
scored.main('/tests', '{harbor.REWARD}')"
"""
_PATCH = "patch -p1 --batch --forward --no-backup-if-mismatch"
_SOLVE = f"""#!/bin/bash
cd {tools.HOME} && {_PATCH} < /solution/fix.patch
"""
_END = "END_OF_PATCH"


def write(folder: records.Folder, record: records.Record, target: pathlib.Path) -> None:
    """Writes a task.

    Args:
        folder: of the task.
        record: the task.
        target: folder to make.

    Raises:
        config.InputError: this machine's /usr has a copy of the solution or the tests,
            which a folder cannot hide from an agent.
    """
    if found := copies.on_host(copies.secrets(folder, record)):
        raise config.InputError(
            f"{record.instance_id}: {found[0]} has its solution or tests, and a folder "
            f"of Harbor's format cannot hide them."
        )
    given = folder.agent_tree(record)
    name = re.sub(r"[^\w-]+", "_", record.instance_id)
    needed = dict.fromkeys(
        ["patch", "python3", *drivers.packages(record.recipe).split()]
    )
    archive = b""
    if runner := runners.name(record.recipe):
        archive = _zip(runners.folder(runner))
    contents: dict[str, bytes | str] = {
        "task.toml": harbor.toml(name, record.recipe.language, workdir=tools.HOME),
        "instruction.md": _INSTRUCTION.format(home=tools.HOME)
        + f"{record.problem_statement}\n",
        "environment/Dockerfile": _DOCKERFILE.format(
            packages=" ".join(needed),
            home=tools.HOME,
            tools=f"COPY {_TOOLS} {_TOOLS_AT}\n" if archive else "",
        ),
        "solution/solve.sh": _SOLVE,
        "solution/fix.patch": record.patch,
        "tests/test.sh": _TEST,
    }
    contents |= {f"environment/{harbor.FILES}/{k}": v for k, v in given.items()}
    contents |= {f"environment/{_TOOLS}": archive} if archive else {}
    tests = _tests(folder, record, given, archive)
    contents |= {f"tests/{path}": text for path, text in tests.items()}
    wrong = attempts.wrong(folder, record)
    for number, turns in enumerate(wrong, 1):
        contents[f"{harbor.WRONG}/{number}.sh"] = _script(turns[0], given)
    harbor.save(target, contents)


def _tests(
    folder: records.Folder,
    record: records.Record,
    given: records.Files,
    archive: bytes,
) -> Mapping[str, bytes | str]:
    """Returns the files that score a task, by path below tests/."""
    recipe = record.recipe
    hidden = folder.hidden_tree(record)
    known = {*given.values()}  # is no secret, and would look like a leak
    kept = {p: c for p, c in given.items() if recipes.is_guarded(p, recipe)}
    kept |= {path: text for path, text in hidden.items() if text in known}
    of_tools = f"{drivers.HOME}/tools"
    runner = drivers.files(recipe, "", of_tools)
    token = next(path for path in runner if path.endswith("/token"))
    task = {
        "repo": tools.HOME,
        "given": sorted(given),
        "guards": recipes.guards(recipe),
        "kept": {path: text.decode("latin-1") for path, text in kept.items()},
        "runner": [(p, t.decode("latin-1")) for p, t in runner.items()],
        "token": token,
        "tools": _TOOLS_AT if archive else "",
        "tools_sha256": hashlib.sha256(archive).hexdigest(),
        "command": drivers.command(recipe, of_tools),
        "parser": recipe.parser,
        "is_guarded": recipe.runner in drivers.GUARDED,
        "seconds": trials.MAX_SECONDS,
        "cpu_seconds": trials.CPU_SECONDS,
        "output_bytes": trials.OUTPUT_BYTES,
        "max_file_bytes": records.MAX_FILE_BYTES,
        "FAIL_TO_PASS": record.FAIL_TO_PASS,
        "PASS_TO_PASS": record.PASS_TO_PASS,
    }
    found: dict[str, bytes | str] = {scored.TASK: json.dumps(task, indent=1)}
    for path, text in hidden.items():
        if text not in known:
            found[f"{scored.HIDDEN}/{path}"] = text
    package = ""
    for part in scored.__name__.split(".")[:-1]:
        package += f"{part}/"
        found[f"{_LIBRARY}/{package}__init__.py"] = ""
    for module in (kinds, parsers, scored):
        path = pathlib.Path(module.__file__ or "")
        found[f"{_LIBRARY}/{package}{path.name}"] = path.read_bytes()
    return found


def _zip(folder: pathlib.Path) -> bytes:
    """Returns an archive of a folder, without byte code, the same each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                info = zipfile.ZipInfo(path.relative_to(folder).as_posix())
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                made.writestr(info, path.read_bytes())
    return buffer.getvalue()


def _script(turn: messages.Message, given: records.Files) -> str:
    """Returns a script that does what a turn's call does."""
    function = turn["tool_calls"][0]["function"]
    told = function["arguments"]
    head = f"#!/bin/bash\ncd {shlex.quote(tools.HOME)}\n"
    if function["name"] == "shell":
        return f"{head}{told['command']}\n"
    path = told["path"]
    changed = given[path].decode().replace(told["old"], told["new"]).encode()
    patch = diffs.make({path: given[path]}, {path: changed})
    return f"{head}{_PATCH} <<'{_END}'\n{patch}{_END}\n"
