"""Reads task folders of Harbor's format that anyone wrote.

    task.toml, instruction.md, environment/Dockerfile, solution/solve.sh, tests/test.sh

A folder may also have wrong/, whose scripts come near a solution and must earn 0. What
a folder needs and a box does not have is named, all of it at once.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

from glm5_jax import config
from glm5_jax.environments.harbor import (
    commands,
    dockerfile,
    folder,
    modules,
    task_file,
)

_MAX_BYTES = 2**25  # of tests, of the solution or of the build's files
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
_SETTINGS = "task.toml"
_SCRIPTS = {"solution": "solve.sh", "tests": "test.sh"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task folder.

    Attributes:
        name: of the folder.
        instruction: for the agent.
        settings: of task.toml.
        build: of the Dockerfile.
        workdir: where commands begin.
        modules: folder of the modules of Python that are installed; None: none are.
        solution: contents of its files by path below /solution.
        tests: contents of their files by path below /tests.
        wrong: scripts that must earn nothing.
    """

    name: str
    instruction: str
    settings: task_file.Settings
    build: dockerfile.Build
    workdir: str
    modules: pathlib.Path | None
    solution: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    wrong: tuple[str, ...]


def find(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the task folders at a path: itself, or those in it.

    Raises:
        config.InputError: there is none.
    """
    paths = [path, *(sorted(path.iterdir()) if path.is_dir() else [])]
    found = [one for one in paths if (one / _SETTINGS).is_file()]
    if not found:
        raise config.InputError(
            f"harbor:{path}: neither it nor a folder in it has a task.toml; name a "
            f"task folder of Harbor's format, or a folder of such."
        )
    return found


def folder_of(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder that the task folders at a path lie in."""
    return path.resolve().parent if (path / _SETTINGS).is_file() else path


def read(path: pathlib.Path) -> Task:
    """Reads a task folder.

    Raises:
        config.InputError: a file is missing or cannot be read, the task needs what a
            box does not have, or pip cannot install its modules.
    """
    try:
        task, refused = _read(path)
    except (ValueError, OSError) as error:
        raise config.InputError(f"{path} cannot be read: {error}.") from error
    if refused:
        raise config.InputError(
            f"{path} needs what a sandbox of this machine does not have: "
            f"{'; '.join(refused)}."
        )
    if not task.build.modules:
        return task
    return dataclasses.replace(task, modules=modules.folder(task.build.modules))


def _read(path: pathlib.Path) -> tuple[Task, list[str]]:
    environment = path / "environment"
    settings = task_file.read(path / _SETTINGS)
    build = dockerfile.read(environment / "Dockerfile")
    workdir = settings.workdir or build.workdir
    wrong = sorted((path / folder.WRONG).glob("*.sh"))
    task = Task(
        name=path.resolve().name,
        instruction=(path / "instruction.md").read_text(encoding="utf-8").strip(),
        settings=settings,
        build=build,
        workdir=workdir,
        modules=None,
        solution=_files(path / "solution"),
        tests=_files(path / "tests"),
        wrong=tuple(file.read_text(encoding="utf-8") for file in wrong),
    )
    refused = [*settings.refusals, *build.refusals]
    for name in _COMPOSE:
        if (environment / name).exists():
            refused.append(f"environment/{name}: several containers are not run here")
    if not workdir and not build.refusals:
        refused.append("a WORKDIR: a box keeps no files in /")
    refused += _refused_scripts(task)
    return task, refused


def _refused_scripts(task: Task) -> Iterator[str]:
    for place, name in _SCRIPTS.items():
        files = task.solution if place == "solution" else task.tests
        if name not in files:
            yield f"{place}/{name}, which is missing"
            continue
        script = files[name].decode(errors="replace")
        if found := commands.needs_network(script):
            yield f"the network, for {place}/{name}: `{'`, `'.join(found)}`"


def _files(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the files below a folder, none that a link leads out of it.

    Raises:
        ValueError: they are too large.
    """
    root = path.resolve()
    found = {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.resolve().is_relative_to(root)
    }
    if sum(map(len, found.values())) > _MAX_BYTES:
        raise ValueError(f"{path.name}/ has more than {_MAX_BYTES} bytes")
    return found
