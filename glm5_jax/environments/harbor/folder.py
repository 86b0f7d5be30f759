"""Writes tasks as folders in Harbor's format, version 1.4.

    task.toml         limits, and that there is no network
    instruction.md
    environment/      Dockerfile, setup.sh and the files of the task
    solution/solve.sh
    tests/test.sh     runs the checks and writes the reward

The Dockerfile is for users of Docker; our environment copies files/ and runs setup.sh
itself.
"""

import pathlib
import shlex
from collections.abc import Mapping, Sequence

SCHEMA_VERSION = "1.4"
_RELEASE = "1.0.0"  # of the tasks; raise it when a family makes others
SETUP, FILES = "setup.sh", "files"  # below environment/
_KEPT = ".keep"  # Docker copies no folder that git or an archive leaves out
REWARD = "/logs/verifier/reward.txt"
_TOML = """schema_version = "{version}"

[task]
name = "glm5_jax/{name}"
version = "{release}"
description = "{tag}"
keywords = ["{tag}"]

[agent]
timeout_sec = 900.0

[verifier]
timeout_sec = 120.0

[environment]
network_mode = "no-network"
workdir = "/work"
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
passed=1
check() {{
    found=$(cd /work && env -i PATH=/usr/bin:/bin HOME=/tmp GIT_CONFIG_NOSYSTEM=1 \\
        GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=/work \\
        timeout 30 bash --noprofile --norc -c "$1") || passed=0
    [ "$(strip "$found")" = "$(strip "$2")" ] || passed=0
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
    """
    lines = [f"check {shlex.quote(c)} {shlex.quote(text)}" for c, text in checks]
    toml = _TOML.format(version=SCHEMA_VERSION, name=name, release=_RELEASE, tag=tag)
    test = _TEST.format(checks="\n".join(lines), reward=REWARD)
    contents = {
        "task.toml": toml,
        "instruction.md": f"{instruction}\n",
        "environment/Dockerfile": _DOCKERFILE,
        f"environment/{SETUP}": f"#!/bin/bash\nrm -f {_KEPT}\n{setup}\n",
        f"environment/{FILES}/{_KEPT}": "",
        "solution/solve.sh": f"#!/bin/bash\ncd /work\n{solution}\n",
        "tests/test.sh": test,
    }
    contents |= {f"environment/{FILES}/{path}": text for path, text in files.items()}
    for path, text in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        if path.endswith(".sh"):
            target.chmod(0o755)
