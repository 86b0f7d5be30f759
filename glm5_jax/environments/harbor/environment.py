"""Our sandbox as an environment of Harbor's harness, which needs no Docker then.

    harbor run -p FOLDER -a oracle --environment-import-path CLASS

with CLASS=glm5_jax.environments.harbor.environment:Bubblewrap (see
docs/worlds/terminal.md).
It takes tasks whose environment is made of files and a setup.sh (folder.py), not those
that need an image. Harbor needs Python 3.12; nothing else here imports it.
"""

import pathlib
import shlex
from typing import Any

from harbor.environments import base
from harbor.environments import capabilities as able

from glm5_jax.environments import sandbox
from glm5_jax.environments.harbor import folder

_SECONDS = 600.0  # of a command without a limit of its own
_TESTS = "/tests"
_FOLDERS = ("/app", "/logs", "/solution", _TESTS)
_LOGS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
_LIMITS = sandbox.Limits(
    seconds=_SECONDS, disk_bytes=512 * 2**20, output_bytes=16 * 2**20
)


class Bubblewrap(base.BaseEnvironment):
    """A box for a trial."""

    _box: sandbox.Box | None = None

    @staticmethod
    def type() -> str:
        """Names the environment."""
        return "glm5_jax-bubblewrap"

    @property
    def capabilities(self) -> able.EnvironmentCapabilities:
        """Says that there is no network."""
        return able.EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> able.EnvironmentResourceCapabilities:
        """Says that no share of the machine can be reserved."""
        return able.EnvironmentResourceCapabilities()

    def _validate_definition(self) -> None:
        """Refuses a task that was not made for it.

        Raises:
            FileNotFoundError: the task has no setup.sh.
        """
        path = self.environment_dir / folder.SETUP
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: this environment has no images; it takes tasks of "
                f"`python -m glm5_jax.environments export`."
            )

    async def start(self, force_build: bool) -> None:
        """Starts the box and runs the task's setup.

        Raises:
            RuntimeError: the setup failed.
        """
        del force_build  # nothing is built
        self._box = await sandbox.start(
            sandbox.Image(folder=self.environment_dir / folder.FILES, folders=_FOLDERS),
            _LIMITS,
        )
        setup = (self.environment_dir / folder.SETUP).read_text(encoding="utf-8")
        made = f"mkdir -p {' '.join(_LOGS)}"
        done = await self._box.run(f"{made} && ( {setup}\n)")
        if done.exit_code != 0:
            raise RuntimeError(f"setup.sh failed: {done.stderr.strip()}")
        await self._box.restart()

    async def stop(self, delete: bool) -> None:
        """Ends the box, whose files go with it."""
        del delete
        if self._box is not None:
            box, self._box = self._box, None
            await box.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> base.ExecResult:
        """Runs a command; a box has one user."""
        del user
        given = {**self._persistent_env, **(env or {})}
        exports = "".join(f"export {k}={shlex.quote(v)}; " for k, v in given.items())
        text = f"( cd {shlex.quote(cwd or '/work')} && {exports}{command}\n)"
        done = await self._inner.run(text, float(timeout_sec or _SECONDS))
        code = 124 if done.is_timeout else 1 if done.exit_code is None else None
        return base.ExecResult(
            stdout=done.stdout,
            stderr=done.stderr,
            return_code=done.exit_code if code is None else code,
        )

    async def upload_file(
        self, source_path: pathlib.Path | str, target_path: str
    ) -> None:
        """Copies a file into the box."""
        source = pathlib.Path(source_path)
        await self._inner.write(target_path, source.read_bytes())
        if source.stat().st_mode & 0o100:
            await self._inner.run(f"chmod +x {shlex.quote(target_path)}")

    async def upload_dir(self, source_dir: pathlib.Path | str, target_dir: str) -> None:
        """Copies a folder into the box, whose processes end before the tests come."""
        source = pathlib.Path(source_dir)
        if pathlib.PurePosixPath(target_dir).is_relative_to(_TESTS):
            await self._inner.restart()  # an agent's shell may answer anything
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            await self.upload_file(path, f"{target_dir}/{path.relative_to(source)}")

    async def download_file(
        self, source_path: str, target_path: pathlib.Path | str
    ) -> None:
        """Copies a file out of the box."""
        target = pathlib.Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(await self._inner.read(source_path))

    async def download_dir(
        self, source_dir: str, target_dir: pathlib.Path | str
    ) -> None:
        """Copies a folder out of the box; links are left out."""
        found = await self._inner.run(
            f"cd {shlex.quote(source_dir)} && find . -type f -print0 | tr '\\0' '\\n'"
        )
        for name in filter(None, found.stdout.split("\n")):
            target = pathlib.Path(target_dir) / name
            if not target.resolve().is_relative_to(pathlib.Path(target_dir).resolve()):
                continue
            await self.download_file(f"{source_dir}/{name}", target)

    @property
    def _inner(self) -> Any:
        assert self._box is not None, "the environment was not started"
        return self._box
