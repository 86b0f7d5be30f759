"""A box without a sandbox: a folder, a shell, and the kernel's limits on processes.

For machines without bubblewrap. It bounds accidents, not malice: commands can read and
write what their user can, use the network and leave processes behind.
"""

import contextlib
import os
import pathlib
import shlex
import signal
from collections.abc import Callable, Sequence

from glm5_jax.environments.sandbox import image as image_lib
from glm5_jax.environments.sandbox import limits as limits_lib
from glm5_jax.environments.sandbox import pipes, processes

_SCRIPT = """set -e
ulimit -c 0
ulimit -f {blocks}
ulimit -v {kib} || true  # not everywhere
mkdir {room}/work
{fill}
cp -R {stage}/. {room}/work/
cd {room}/work
printf 'ready\\n'
exec 2>/dev/null  # a shell tells what was killed
while IFS= read -r line; do
  {shell} {pipes} || true
  printf 'ended\\n'
done
"""


def holder(
    room: pathlib.Path,
    stage: pathlib.Path,
    image: image_lib.Image,
    shell: list[str],
    limits: limits_lib.Limits,
) -> list[str]:
    """Returns the command of a holder; see bubblewrap.py. A bind is seen anyway."""
    fill = ":"
    if image.folder is not None:
        fill = (
            f"cp -R {shlex.quote(str(image.folder))}/. {shlex.quote(str(room))}/work/"
        )
    environ = "HOME=$PWD PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8"
    script = _SCRIPT.format(
        blocks=-(-limits.disk_bytes // 512),
        kib=limits.memory_bytes // 1024,
        room=shlex.quote(str(room)),
        stage=shlex.quote(str(stage)),
        fill=fill,
        pipes=pipes.redirections(room.parent),
        shell=f"env -i {environ} setsid --wait {shlex.join(shell)}",
    )
    return ["sh", "-c", script]


def confined(words: Sequence[str], binds: Sequence[str] = ()) -> list[str]:
    """Returns the command as it is; see bubblewrap.py."""
    del binds  # seen anyway
    return [*words]


def kill(holder: int, tell: Callable[[bytes], object]) -> None:
    """Ends the shell and the commands in its process group."""
    del tell  # the kernel does it
    for pid in processes.children(holder):
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # it leads no group yet
                os.kill(pid, signal.SIGKILL)


def resident_bytes(holder: int) -> int:
    """Returns the memory of a box's processes."""
    return processes.resident_bytes(holder)


def seconds_to_close() -> float:
    """Returns 0: a holder keeps nothing."""
    return 0.0


def owner() -> int:
    """Returns the number of the user that shells run as."""
    return os.geteuid()


def home(room: pathlib.Path) -> str:
    """Returns where the box's files are."""
    return str(room / "work")


def missing() -> str:
    """Returns "": a shell is everywhere."""
    return ""
