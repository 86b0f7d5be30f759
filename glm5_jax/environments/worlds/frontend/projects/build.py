"""Builds a project in the sandbox, without a network: `npm run build`."""

import asyncio
import dataclasses
import errno
import shlex
import weakref
from collections.abc import Mapping

from glm5_jax.environments import sandbox
from glm5_jax.environments.worlds.frontend.projects import kit

SECONDS = 120.0  # of a build
FOLDERS = ("node_modules", "dist")  # not a submission's
_LIMITS = sandbox.Limits(
    seconds=SECONDS,
    memory_bytes=2**40,  # of addresses, which node reserves and does not use
    resident_bytes=3.0 * 2**30,
    num_processes=128,
    disk_bytes=2**26,
    output_bytes=2**23,
)
_MOST_FILES, _MOST_BYTES = 50, 2**21  # of what is built
_MOST_LOG = 2000  # characters, of the end
_PATH_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
_AT_ONCE = 2  # builds, each with a process for every core
_LINK = "mkdir node_modules && ln -s {kit}/* {kit}/.bin node_modules/"
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True)
class Built:
    """What became of a build."""

    files: Mapping[str, bytes]  # below dist/; none: it failed
    log: str


async def build(files: Mapping[str, str]) -> Built:
    """Builds a project.

    Args:
        files: texts by path, all that the project has but its packages.

    Raises:
        config.InputError: there is no npm, or its packages cannot be fetched.
        sandbox.BrokenError: the box failed, which is not the project's fault.
    """
    packages = await asyncio.to_thread(kit.folder)
    texts = {path: text.encode() for path, text in files.items()}
    loop = asyncio.get_running_loop()
    async with _gates.setdefault(loop, asyncio.Semaphore(_AT_ONCE)):
        image = sandbox.Image(texts, binds=(packages,))
        try:
            box = await sandbox.start(image, _LIMITS)
        except OSError as error:
            if error.errno not in _PATH_ERRORS:
                raise
            return Built({}, f"the files cannot lie so: {error.strerror}.")
        try:
            return await _built(box, shlex.quote(str(packages / "node_modules")))
        finally:
            await box.close()


async def _built(box: sandbox.Box, packages: str) -> Built:
    await box.run(_LINK.format(kit=packages))
    done = await box.run("npm run build --silent 2>&1")
    log = done.text()[-_MOST_LOG:]
    if done.exit_code is None and not done.is_timeout:
        log += f"\nThe build took more than {_LIMITS.resident_bytes / 2**30:g} GiB."
    if done.exit_code != 0:
        return Built({}, log)
    listed = await box.run("cd dist && find . -type f -printf '%s %P\\0'; cd /work")
    sizes = [line.partition(" ")[::2] for line in listed.stdout.split("\0")[:-1]]
    if len(sizes) > _MOST_FILES or sum(int(size) for size, _ in sizes) > _MOST_BYTES:
        return Built({}, f"{log}\ndist/ has more than {_MOST_BYTES} bytes.")
    try:
        return Built({path: await box.read(f"dist/{path}") for _, path in sizes}, log)
    except sandbox.FileError as error:
        return Built({}, f"{log}\n{error}")
