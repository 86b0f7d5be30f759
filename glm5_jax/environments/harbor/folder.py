"""Writes tasks as folders in Harbor's format, version 1.4.

    task.toml         limits, and that there is no network
    instruction.md
    environment/      Dockerfile, setup.sh and the files of the task
    solution/solve.sh
    tests/test.sh     runs the checks and writes the reward
    wrong/N.sh        comes near a solution and must earn 0; Harbor does not read it

The Dockerfile is for users of Docker; our environment copies files/ and runs setup.sh
itself.
"""

import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence

SCHEMA_VERSION = "1.4"
_RELEASE = "1.0.0"  # of the tasks; raise it when a family makes others
SETUP, FILES = "setup.sh", "files"  # below environment/
_KEPT = ".keep"  # Docker copies no folder that git or an archive leaves out
WRONG = "wrong"
REWARD = "/logs/verifier/reward.txt"
_TOML = """schema_version = "{version}"

[task]
name = "glm5_jax/{name}"
version = "{release}"
description = {tag}
keywords = [{tag}]

[agent]
timeout_sec = {agent_seconds}

[verifier]
timeout_sec = 120.0

[environment]
network_mode = "no-network"
workdir = "{workdir}"
"""
_DOCKERFILE = """FROM debian:bookworm
RUN apt-get update && apt-get install -y --no-install-recommends \\
    git make patch procps python3 && rm -rf /var/lib/apt/lists/*
COPY files /work
COPY setup.sh /setup.sh
WORKDIR /work
RUN bash /setup.sh && rm /setup.sh
"""
_TEST = """#!/bin/bash
# Runs each check in a shell of its own; the reward is 1 if all of them pass.
passed=1 number=0
check() {{
    number=$((number + 1))
    is_right=1
    found=$(cd /work && env -i PATH=/usr/bin:/bin HOME=/tmp GIT_CONFIG_NOSYSTEM=1 \\
        GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=/work \\
        timeout 30 bash --noprofile --norc -c "$1") || is_right=0
    [ "$(strip "$found")" = "$(strip "$2")" ] || is_right=0
    [ $is_right = 1 ] && return
    passed=0
    printf 'check %s fails: it must print %q, and prints %q\n' \
        "$number" "$(strip "$2")" "$(strip "$found")"
}}
strip() {{
    local text=$1
    text=${{text#"${{text%%[![:space:]]*}}"}}
    printf %s "${{text%"${{text##*[![:space:]]}}"}}"
}}
{checks}
mkdir -p "$(dirname {reward})"
echo $passed > {reward}
"""


def write(
    folder: pathlib.Path,
    name: str,
    tag: str,
    *,
    instruction: str,
    files: Mapping[str, str],
    setup: str,
    solution: str,
    checks: Sequence[tuple[str, str]],
    wrong: Sequence[str] = (),
    agent_seconds: float = 900.0,
) -> None:
    """Writes a task.

    Args:
        folder: to make.
        name: of the task, of letters, digits, - and _.
        tag: kind of the task.
        instruction: for the agent.
        files: contents by path below /work.
        setup: commands that run in /work before the agent; "" for none.
        solution: commands that solve the task.
        checks: commands, and what each must print.
        wrong: commands that come near a solution and must earn nothing.
        agent_seconds: that a solution may take.
    """
    lines = [f"check {shlex.quote(c)} {shlex.quote(text)}" for c, text in checks]
    test = _TEST.format(checks="\n".join(lines), reward=REWARD)
    contents = {
        "task.toml": toml(name, tag, agent_seconds=agent_seconds),
        "instruction.md": f"{instruction}\n",
        "environment/Dockerfile": _DOCKERFILE,
        f"environment/{SETUP}": f"#!/bin/bash\nrm -f {_KEPT}\n{setup}\n",
        f"environment/{FILES}/{_KEPT}": "",
        "solution/solve.sh": f"#!/bin/bash\ncd /work\n{solution}\n",
        "tests/test.sh": test,
    }
    contents |= {f"environment/{FILES}/{path}": text for path, text in files.items()}
    contents |= {
        f"{WRONG}/{number}.sh": f"#!/bin/bash\ncd /work\n{text}\n"
        for number, text in enumerate(wrong, 1)
    }
    save(folder, contents)


def toml(
    name: str, tag: str, *, workdir: str = "/work", agent_seconds: float = 900.0
) -> str:
    """Returns a task.toml.

    Args:
        name: of the task, of letters, digits, - and _.
        tag: kind of the task.
        workdir: where commands begin.
        agent_seconds: that a solution may take.
    """
    return _TOML.format(
        version=SCHEMA_VERSION,
        name=name,
        release=_RELEASE,
        tag=json.dumps(tag),
        workdir=workdir,
        agent_seconds=agent_seconds,
    )


def save(folder: pathlib.Path, contents: Mapping[str, bytes | str]) -> None:
    """Writes the files of a task folder; those that name an interpreter may be run."""
    for path, text in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        content = text.encode() if isinstance(text, str) else text
        target.write_bytes(content)
        if content.startswith(b"#!"):
            target.chmod(0o755)
