"""A box of bubblewrap: namespaces of its own, a file system in memory of bounded size.

Its processes, from the outside in: the holder, a shell script in a user namespace in
which it may mount, mounts the files and starts bubblewrap for each life of the inner
shell; bubblewrap makes the namespaces that commands run in, and waits for the end of
the shell, which the kernel delays until all other processes of them have ended. No
command sees the holder or bubblewrap. When the holder dies, the kernel ends all others
and drops the files.

All that a shell can write lies in one file system in memory, of Limits.disk_bytes:
/work, which stays from one shell to the next, and /tmp, /dev/shm and the root folder,
which are new for each. An image's folder lies below /work as the lower layer of an
overlay, so that it costs nothing to start with and is never written. For root, whose
files another user could not change in a layer, it is copied.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence

from glm5_jax.environments.sandbox import image as image_lib
from glm5_jax.environments.sandbox import limits as limits_lib
from glm5_jax.environments.sandbox import pipes, processes

# The user that root's boxes run as: the limit on processes does not bind root.
_NOBODY = 65534
_PROBE_SECONDS = 10
# The holder ends with the process that started it; a new namespace forgets the signal.
_UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount"),
    *("setpriv", "--pdeathsig", "KILL"),
)
_SCRIPT = """set -e
mount -t tmpfs -o size={size},nr_inodes={inodes},mode=755 tmpfs {room}
mkdir {room}/up {room}/aside {room}/work {room}/more {life}
: > {room}/empty
{more}
{fill}
cp -R --preserve=mode,links,timestamps {stage}/. {room}/work/
printf 'ready\\n'
exec 2>/dev/null  # a shell tells what was killed
while IFS= read -r line; do
  if [ -e {room}/life/root/usr ]; then rm -rf {room}/life; mkdir {life} || true; fi
  {bwrap} {pipes} || true
  printf 'ended\\n'
done
"""
_OVERLAY = (
    "mount -t overlay overlay -o lowerdir={folder},upperdir={room}/up,"
    "workdir={room}/aside,userxattr {room}/work"
)
_COPY = "cp -R --preserve=mode,links,timestamps {folder}/. {room}/work/"
_ISOLATED = (
    *("--unshare-all", "--unshare-user", "--disable-userns"),
    *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
    *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
    *(word for pair in image_lib.VARIABLES.items() for word in ("--setenv", *pair)),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/sbin", "/sbin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
)
_BYTES_OF_A_FILE = 4096  # at least: bounds their number
_LEAST_FILES = 4096
_CONFINED_BYTES = 2**29  # of each of /tmp and /dev/shm of a program alone


def holder(
    room: pathlib.Path,
    stage: pathlib.Path,
    image: image_lib.Image,
    shell: list[str],
    limits: limits_lib.Limits,
) -> list[str]:
    """Returns the command of a holder.

    Args:
        room: an empty folder to mount the box's files at.
        stage: folder of the image's files.
        image: the rest of it.
        shell: command of the inner shell.
        limits: of the box.
    """
    more = {path: room / "more" / str(i) for i, path in enumerate(image.folders)}
    binds = [word for path, at in more.items() for word in ("--bind", at, path)]
    # One may lie below a folder, such as /tmp.
    binds += [word for path in image.binds for word in ("--ro-bind", path, path)]
    for path in image.hidden:
        empty = ["--tmpfs", path, "--remount-ro", path]
        binds += empty if path.is_dir() else ["--ro-bind", room / "empty", path]
    root, shm = life = room / "life/root", room / "life/shm"
    # The shell is the first process. Bubblewrap's own would be one that commands can
    # trace: it then says outside that all have ended, and lets them live.
    inner = ["bwrap", "--as-pid-1", "--bind", root, "/", *_ISOLATED]
    inner += ["--dir", "/tmp", "--bind", shm, "/dev/shm", "--remount-ro", "/dev"]
    inner += [*binds, "--bind", room / "work", "/work", "--chdir", "/work", *shell]
    fill = ":"
    if image.folder is not None:
        fill = _COPY if os.geteuid() == 0 else _OVERLAY
        folder, at = (shlex.quote(str(path)) for path in (image.folder, room))
        fill = fill.format(folder=folder, room=at)
    script = _SCRIPT.format(
        size=limits.disk_bytes,
        inodes=max(limits.disk_bytes // _BYTES_OF_A_FILE, _LEAST_FILES),
        life=shlex.join(map(str, (room / "life", *life))),
        room=shlex.quote(str(room)),
        stage=shlex.quote(str(stage)),
        fill=fill,
        more=shlex.join(["mkdir", *map(str, more.values())]) if more else ":",
        bwrap=shlex.join(map(str, inner)),
        pipes=pipes.redirections(room.parent),
    )
    # Set here, as the kernel also counts the processes of all boxes against the bound
    # that was in force when the namespace was made.
    bounds = {
        "nproc": limits.num_processes,
        "as": limits.memory_bytes,
        "fsize": limits.disk_bytes,
        "core": 0,
    }
    bounded = ["prlimit", *(f"--{name}={value}" for name, value in bounds.items())]
    return [*_as_user(), *_UNSHARE, *bounded, "sh", "-c", script]


def confined(words: Sequence[str], binds: Sequence[str] = ()) -> list[str]:
    """Returns the command that runs one program alone, without a shell or files.

    Args:
        words: of the program's command.
        binds: folders of this machine that it sees, read-only, where they exist.
    """
    seen = [word for path in binds for word in ("--ro-bind-try", path, path)]
    for path in ("/tmp", "/dev/shm"):
        seen += ["--size", str(_CONFINED_BYTES), "--tmpfs", path]
    fixed = ("--remount-ro", "/dev", "--remount-ro", "/")
    return [*_as_user(), "bwrap", *_ISOLATED, *seen, *fixed, *words]


def kill(holder: int, tell: Callable[[bytes], object]) -> None:
    """Ends all processes of the namespaces that a holder's bubblewrap has made, if any.

    The kernel ends their first process last, and bubblewrap waits for that.
    """
    del tell  # the kernel does it
    for bwrap in processes.children(holder):
        for first in processes.children(bwrap):
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)


def resident_bytes(holder: int) -> int:
    """Returns the memory of a box's processes."""
    return processes.resident_bytes(holder)


def seconds_to_close() -> float:
    """Returns 0: when a holder is killed, all is over."""
    return 0.0


def owner() -> int:
    """Returns the number of the user that shells run as."""
    return _NOBODY if os.geteuid() == 0 else os.geteuid()


def home(room: pathlib.Path) -> str:
    """Returns where the box's files are, as its shells see it."""
    del room  # is seen there
    return "/work"


def missing() -> str:
    """Returns why bubblewrap does not work here, "" if it does."""
    if not shutil.which("bwrap"):
        return "there is no bwrap; install the package bubblewrap."
    if not shutil.which("unshare") or not shutil.which("setpriv"):
        return "there is no unshare or no setpriv; install the package util-linux."
    command = [*_as_user(), *_UNSHARE, "bwrap", *_ISOLATED, "true"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be tried: {error}."
    return done.stderr.strip() if done.returncode else ""


def _as_user() -> list[str]:
    if os.geteuid() != 0:
        return []
    user = f"--reuid={_NOBODY}", f"--regid={_NOBODY}"
    return ["setpriv", *user, "--clear-groups"]
