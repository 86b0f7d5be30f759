"""Reads task.toml of Harbor's format, and says what a box does not have of it."""

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_TOP = {
    *("schema_version", "version", "task", "metadata", "verifier", "agent"),
    *("environment", "solution", "source", "artifacts"),
}
# Keys of each section that mean the same here, or nothing.
_KNOWN = {
    "agent": {"timeout_sec", "network_mode", "allowed_hosts"},
    "verifier": {"timeout_sec", "env", "network_mode", "allowed_hosts"},
    "solution": {"env"},
    "environment": {
        *("build_timeout_sec", "cpus", "memory_mb", "storage_mb", "memory", "storage"),
        # That the network may be used does not say that it is needed.
        *("env", "workdir", "network_mode", "allow_internet", "allowed_hosts"),
    },
}
# ... and the values for which others mean nothing.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "user": ("root", 0, "0"),
    "os": ("linux", "Linux"),
    "gpus": (0,),
    "mcp_servers": ([],),
    "collect": ([],),
    "environment_mode": ("shared",),
    "gpu_types": ([],),
}
_WHY = {
    "user": "a box has one user",
    "docker_image": "there are no images here",
    "environment_mode": "work is scored in its own box",
    "environment": "work is scored in its own box",
    "steps": "tasks of several steps are not played",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What task.toml says.

    Attributes:
        tag: kind of the task: the first keyword, or the category.
        agent_seconds: that the solution may take.
        verifier_seconds: that the tests may take.
        build_seconds: that all steps of the Dockerfile may take.
        workdir: where commands begin; "": where the Dockerfile says.
        env: variables of every command.
        verifier_env: further ones of the tests.
        solution_env: further ones of the solution.
        refusals: what a box does not have.
    """

    tag: str
    agent_seconds: float
    verifier_seconds: float
    build_seconds: float
    workdir: str
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    refusals: tuple[str, ...]


def read(path: pathlib.Path) -> Settings:
    """Reads a file.

    Raises:
        ValueError: it is no TOML, or a section or a number is none.
    """
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    sections = {name: _section(fields, name) for name in (*_KNOWN, "task", "metadata")}
    environment, verifier = sections["environment"], sections["verifier"]
    env, refused = {}, [*_refused(fields, sections)]
    for name in ("environment", "verifier", "solution"):
        given, missing = _variables(sections[name].get("env", {}))
        env[name] = given
        refused += [f"[{name}] env needs {key} of the machine" for key in missing]
    keywords = sections["task"].get("keywords") or [
        sections["metadata"].get("category", "")
    ]
    return Settings(
        tag=str(keywords[0]),
        agent_seconds=float(sections["agent"].get("timeout_sec") or 600.0),
        verifier_seconds=float(verifier.get("timeout_sec") or 600.0),
        build_seconds=float(environment.get("build_timeout_sec") or 600.0),
        workdir=environment.get("workdir") or "",
        env=env["environment"],
        verifier_env=env["verifier"],
        solution_env=env["solution"],
        refusals=tuple(refused),
    )


def _section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = fields.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{name} must be a section, got {section!r}")
    return section


def _refused(
    fields: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for key, value in fields.items():
        if key not in _TOP and value and key != "multi_step_reward_strategy":
            yield f"{key}: {_WHY.get(key, 'this key is not known')}"
    for name, known in _KNOWN.items():
        for key, value in sections[name].items():
            if key in known or value in (None, "", {}, *_ALLOWED.get(key, ())):
                continue
            why = _WHY.get(key, "this is not done here")
            shown = value if isinstance(value, bool | int | str) else "..."
            yield f"[{name}] {key} = {shown}: {why}"


def _variables(given: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns variables with the defaults of their templates, and what has none."""
    missing = []

    def default(match: re.Match[str]) -> str:
        if match[2] is None:
            missing.append(match[1])
        return match[2] or ""

    values = {key: _TEMPLATE.sub(default, str(value)) for key, value in given.items()}
    return values, missing
