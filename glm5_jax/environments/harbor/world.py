"""Task folders of Harbor's format as a world, in our sandbox.

A box is made by the steps of the task's Dockerfile. At the end all processes of the
agent are ended, its own tests and logs are removed, and /tests/test.sh writes the
reward, as Harbor has it.
"""

import base64
import functools
import hashlib
import json
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from glm5_jax import config, messages
from glm5_jax.environments import listed, proofs, protocol, sandbox, tool_calls
from glm5_jax.environments.harbor import cheats, dockerfile, folder, reading

PREFIX = "harbor:"
MAX_TURNS = 60
_SECONDS = 60.0  # of an agent's command
_MOST_SECONDS = 240.0  # of the build, of the solution and of the tests
_HELD_OUT = 5  # one task in so many
_DISK_BYTES = 512 * 2**20
_ADDRESSES = 2**37  # V8 reserves far more than it uses, which has a limit of its own
# Folders that every box has, and keeps until the end of the episode.
_FOLDERS = (
    *("app", "data", "home", "logs", "mnt", "opt", "root", "solution", "srv", "tests"),
    *("tmp", "var", "workspace"),
)
# Files of an image lie below /work; a build that works there must not see them.
_STAGED, _STAGE = "/work/.build", "/logs/.build"
_JSON = "/logs/verifier/reward.json"
_LOGS = "mkdir -p /logs/agent /logs/artifacts /logs/verifier"
_CLEAR = (
    "chmod -R u+rwX /logs /tests /solution && "
    "find /logs /tests /solution -mindepth 1 -delete"
)
_SHOWN = 3  # refusals, where no folder can be played
_KEPT_OUTPUT = 4000  # characters of the tests' output, for people
# Python's own settings of a user are an agent's.
_ENV = {"HOME": "/root", "PYTHONNOUSERSITE": "1"}
_ETC = ("java-*-openjdk", "php")
TOOLS = tool_calls.SHELL


class Harbor(listed.Listed[reading.Task]):
    """The task folders at a path that a box can play."""

    def __init__(self, name: str) -> None:
        """Reads the tasks of "harbor:PATH", a task folder or a folder of such.

        A folder among several that cannot be played is named in the log.

        Raises:
            config.InputError: none can be played.
        """
        by_id: dict[str, reading.Task] = {}
        refusals = []
        at = pathlib.Path(name.removeprefix(PREFIX))
        for path in reading.find(at):
            try:
                task = reading.read(path)
            except config.InputError as error:
                refusals.append(str(error))
                logging.warning("%s", error)
            else:
                by_id[task.name] = task
        if not by_id:
            raise config.InputError(" ".join(refusals[:_SHOWN]))
        super().__init__(
            name,
            by_id,
            _HELD_OUT,
            "take the other split",
            proofs=reading.folder_of(at) / listed.PROOFS,
        )

    def task_of(self, read: reading.Task) -> protocol.Task:
        """Returns the task of a folder."""
        said = {"role": "user", "content": read.instruction}
        return protocol.Task(
            id=read.name,
            messages=(said,),
            answer=read.name,
            tools=TOOLS,
            tag=read.settings.tag,
        )

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode(self)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message]:
        """Returns the task and the turns that solve it."""
        return (*task.messages, *self.attempts(task).right)

    def attempts(self, task: protocol.Task) -> proofs.Attempts:
        """Returns the turns of the solution, and those of wrong ones and of cheats."""
        read = self.by_id[task.answer]
        wrong = [_script({"solve.sh": text.encode()}, {}) for text in read.wrong]
        wrong += cheats.commands(read.workdir)
        right = _script(read.solution, read.settings.solution_env)
        return proofs.Attempts(_turns(right), tuple(map(_turns, wrong)))

    def scored_by(self, task: protocol.Task) -> str:
        """Returns the tests of a task, its settings and its build."""
        read = self.by_id[task.answer]
        build = read.build.steps, read.build.env, read.build.modules
        return repr((read.tests, read.settings, read.workdir, build))

    async def leaks(self, environment: "Episode", task: protocol.Task) -> list[str]:
        """Looks for the files of solution and tests among those of the box.

        Raises:
            TimeoutError: the search takes too long.
        """
        read = self.by_id[task.answer]
        secret = {**read.solution, **read.tests}.values()
        digests = {hashlib.sha256(text).hexdigest() for text in secret if text.strip()}
        tops = " ".join(f"/{name}" for name in sorted(environment.folders))
        command = f"find /work {tops} -type f -size -1024k -exec sha256sum {{}} +"
        found = await environment.box.run(command)
        if found.is_timeout:
            raise TimeoutError(f"the search took more than {found.seconds:.0f} s")
        lines = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
        return [path for digest, path in lines if digest in digests]


class Episode:
    """An episode in a box of its own."""

    def __init__(self, world: Harbor, max_turns: int = MAX_TURNS) -> None:
        """Makes an environment that cuts an episode off after so many turns."""
        self._world, self._max_turns = world, max_turns
        self._num_turns = 0
        self._read: reading.Task | None = None
        self._box: sandbox.Box | None = None
        self.folders: frozenset[str] = frozenset()  # top folders that are kept

    @property
    def box(self) -> sandbox.Box:
        """Returns the box of the episode under way."""
        assert self._box is not None
        return self._box

    @property
    def read(self) -> reading.Task:
        """Returns the task of the episode under way."""
        assert self._read is not None
        return self._read

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Builds the box.

        Raises:
            RuntimeError: a step of the Dockerfile fails.
        """
        self._read, self._num_turns = self._world.by_id[task.answer], 0
        read = self.read
        self.folders = frozenset((*_FOLDERS, *read.build.folders)) - {"work"}
        image = sandbox.Image(
            _staged(read.build),
            binds=(*_settings(), *((read.modules,) if read.modules else ())),
            folders=tuple(f"/{name}" for name in sorted(self.folders)),
        )
        limits = sandbox.Limits(
            seconds=min(read.settings.build_seconds, _MOST_SECONDS),
            disk_bytes=_DISK_BYTES,
            memory_bytes=_ADDRESSES,
        )
        self._box = await sandbox.start(image, limits, "bubblewrap")
        await self._build()
        await self._begin()
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Runs the turn's calls; submit, or a turn without calls, ends the episode."""
        self._num_turns += 1
        results, is_over = await tool_calls.answer(message, TOOLS, self._shell)
        is_over |= not message.get("tool_calls")
        if is_over or self._num_turns >= self._max_turns:
            return await self._score(is_cut=not is_over)
        return protocol.StepResult(results, None, False, False)

    async def close(self) -> None:
        """Ends the box."""
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()

    async def _build(self) -> None:
        """Does the steps of the Dockerfile."""
        await self.box.run(f"if [ -e {_STAGED} ]; then mv {_STAGED} {_STAGE}; fi")
        for number, step in enumerate(self.read.build.steps):
            env = step.env if isinstance(step, dockerfile.Run) else {}
            done = await self.box.run(_command(step, number, self._env(env)))
            if done.exit_code != 0:
                raise RuntimeError(f"the Dockerfile's {_named(step)}: {done.text()}")
        lost = await self.box.run(
            f"rm -rf {_STAGE}; find / -mindepth 1 -maxdepth 1 -printf '%f\\n'"
        )
        known = {*self.folders, *dockerfile.FIXED, "work"}
        if left := sorted(set(lost.stdout.split()) - known):
            raise RuntimeError(
                f"the Dockerfile leaves /{left[0]}, which a box does not keep; put it "
                f"into a folder, such as the WORKDIR."
            )

    async def _begin(self) -> None:
        """Ends all processes, and gives the next shell its folder and variables."""
        await self.box.restart()
        await self._enter()

    async def _enter(self) -> None:
        given = {**self._env(self.read.build.env), **self.read.settings.env}
        workdir = shlex.quote(self.read.workdir)
        await self.box.run(
            f"{_LOGS}; mkdir -p {workdir}; cd {workdir}; {_exports(given)}"
        )

    def _env(self, given: Mapping[str, str]) -> Mapping[str, str]:
        """Returns variables of the Dockerfile, and where its modules are."""
        env = {**_ENV, **given}
        if found := self.read.modules:
            path = env.get("PATH", dockerfile.PATH)
            env |= {"PYTHONPATH": str(found), "PATH": f"{found}/bin:{path}"}
        return env

    async def _shell(self, name: str, arguments: Mapping[str, str]) -> str:
        del name  # the only tool besides submit
        done = await self.box.run(arguments["command"], seconds=self._seconds())
        if done.exit_code is None:  # the next shell is a new one
            await self._enter()
        return done.text()

    def _seconds(self) -> float:
        return min(max(_SECONDS, self.read.settings.agent_seconds), _MOST_SECONDS)

    async def _score(self, *, is_cut: bool) -> protocol.StepResult:
        """Runs the tests on what the agent left."""
        total, parts, info = 0.0, {}, {}
        try:
            info["output"] = await self._test()
            rewards = await self._rewards()
            total = _total(rewards)
            parts = {key: float(value) for key, value in rewards.items()}
        except ValueError as error:
            info["problem"] = str(error)
        reward = protocol.Reward(total, parts)
        return protocol.StepResult((), reward, not is_cut, is_cut, info)

    async def _test(self) -> str:
        """Runs the tests and returns what they print.

        Raises:
            ValueError: they cannot be run, or take too long.
        """
        await self.box.restart()
        if (await self.box.run(_CLEAR)).exit_code != 0:
            raise ValueError("the agent's files cannot be removed from /tests or /logs")
        try:
            for path, content in self.read.tests.items():
                await self.box.write(f"/tests/{path}", content)
        except sandbox.FileError as error:  # the disk is full
            raise ValueError(str(error)) from error
        programs = _programs(self.read.tests, "/tests")
        await self.box.run(f"chmod +x /tests/test.sh{programs}")
        await self._enter()  # last: the task's PATH may have programs of the agent
        exports = _exports(self.read.settings.verifier_env)
        seconds = min(self.read.settings.verifier_seconds, _MOST_SECONDS)
        done = await self.box.run(f"( {exports}/tests/test.sh )", seconds)
        if done.is_timeout:
            raise ValueError("the tests take too long")
        return done.text()[-_KEPT_OUTPUT:]

    async def _rewards(self) -> Mapping[str, Any]:
        """Returns what the tests wrote, read by a shell that has run none of them.

        Raises:
            ValueError: it is nothing, or no numbers.
        """
        await self.box.restart()
        for path in (_JSON, folder.REWARD):
            try:
                text = (await self.box.read(path)).decode(errors="replace")
            except sandbox.FileError:
                continue
            found = json.loads(text) if path == _JSON else float(text)
            rewards = found if isinstance(found, dict) else {"reward": found}
            if all(type(v) in (int, float) for v in rewards.values()) and all(
                map(math.isfinite, rewards.values())
            ):
                return rewards
            raise ValueError(f"{path} must have finite numbers, got {text[:80]!r}")
        raise ValueError(f"the tests write neither {folder.REWARD} nor {_JSON}")


@functools.cache
def _settings() -> tuple[pathlib.Path, ...]:
    """Returns folders of this machine without which programs of its /usr do not run."""
    etc = pathlib.Path("/etc")
    return tuple(path for name in _ETC for path in sorted(etc.glob(name)))


def _total(rewards: Mapping[str, Any]) -> float:
    if "reward" in rewards or len(rewards) == 1:
        return float(rewards.get("reward", next(iter(rewards.values()))))
    raise ValueError(f"{_JSON} has no `reward` among {', '.join(rewards) or 'nothing'}")


def _staged(build: dockerfile.Build) -> dict[str, bytes]:
    """Returns the files of all copies, each copy's in a folder of its own."""
    at = _STAGED.removeprefix("/work/")
    return {
        f"{at}/{number}{path}": file.content
        for number, step in enumerate(build.steps)
        if isinstance(step, dockerfile.Copy)
        for path, file in step.files.items()
    }


def _command(
    step: dockerfile.Copy | dockerfile.Run, number: int, env: Mapping[str, str]
) -> str:
    if isinstance(step, dockerfile.Run):
        inner = f"cd {shlex.quote(step.workdir)} && {{ {step.command}\n}}"
        script = f"{_exports(env)}{inner}"
        return f"/bin/sh -c {shlex.quote(script)}"
    modes = {True: [], False: []}
    for path, file in step.files.items():
        modes[file.is_program].append(shlex.quote(path))
    parts = [f"cp -R {_STAGE}/{number}/. /"] if step.files else ["true"]
    parts += [f"chmod 755 {' '.join(modes[True])}"] if modes[True] else []
    parts += [f"chmod 644 {' '.join(modes[False])}"] if modes[False] else []
    return " && ".join(parts)


def _named(step: dockerfile.Copy | dockerfile.Run) -> str:
    if isinstance(step, dockerfile.Run):
        return f"RUN {step.command.strip()[:200]}"
    return f"COPY of {next(iter(step.files), 'nothing')}"


def _exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {k}={shlex.quote(v)}; " for k, v in env.items())


def _script(files: Mapping[str, bytes], env: Mapping[str, str]) -> str:
    """Returns a command that writes the files of a solution and runs it."""
    parts = ["mkdir -p /solution"]
    for path, content in files.items():
        at = shlex.quote(f"/solution/{path}")
        parts.append(f'mkdir -p "$(dirname {at})"')
        text = content.decode(errors="replace")
        if text.encode() == content and text.endswith("\n") and _END not in text:
            parts.append(f"cat > {at} <<'{_END}'\n{text}{_END}")
        else:
            coded = base64.b64encode(content).decode()
            parts.append(f"echo {coded} | base64 -d > {at}")
    parts.append(f"chmod +x /solution/solve.sh{_programs(files, '/solution')}")
    return "\n".join([*parts, f"( {_exports(env)}/solution/solve.sh )"])


def _programs(files: Mapping[str, bytes], at: str) -> str:
    """Returns paths of the files that name their interpreter, each after a blank."""
    found = [path for path, text in files.items() if text.startswith(b"#!")]
    return "".join(f" {shlex.quote(f'{at}/{path}')}" for path in found)


_END = "END_OF_FILE"


def _turns(command: str) -> tuple[messages.Message, ...]:
    shell = tool_calls.turn("shell", command=command)
    return (shell, tool_calls.turn(tool_calls.SUBMIT))
