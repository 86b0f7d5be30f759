"""A box of podman or Docker: a container that sees /usr and nothing else of a machine.

It lives as long as its box. Its first process is a script, `_FIRST`, as the container's
root; it starts each life of the inner shell as another user, who can neither signal nor
trace it. A shell ends by itself, by the word "kill", or because all processes take too
much memory. Then the script has the kernel end every process but itself, waits until
none is left, and says so; it needs no new process for that, which a fork bomb would not
leave it. It reads the end of its input when the program that started the box has ended,
and with it ends the container.

All that a shell can write are file systems in memory whose sizes add up to
Limits.disk_bytes: most is for /work, and /tmp, /dev/shm and an image's folders have a
part each. The engine bounds processes and memory, of files too. Its image is a few
empty folders and links, and imported once.
"""

import contextlib
import dataclasses
import functools
import mmap
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable

from glm5_jax.environments.sandbox import container_files, pipes
from glm5_jax.environments.sandbox import image as image_lib
from glm5_jax.environments.sandbox import limits as limits_lib

_SEEN = ("/usr", "/etc/alternatives", "/etc/ld.so.cache")
_AT = f"/{container_files.PRIVATE}/at"  # the box's folder
_FOLDER = f"/{container_files.PRIVATE}/folder"  # of the image
_USER = 1000
_FIRST_ID, _NUM_IDS = 200_000, 65_536  # of this machine, for podman's root and users
_PARTS_OF_WORK = 6  # of the disk; each other folder has one
_BYTES_OF_A_FILE = 4096  # at least: bounds their number
_LEAST_FILES = 4096  # in all
_PROBE_SECONDS = 60
_SECONDS_TO_CLOSE = 10.0
_MOST_OPEN = 4096  # files of a process
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
_ISOLATED = (
    *("run", "--rm", "--interactive", "--pull=never", "--log-driver=none"),
    *("--network=none", "--ipc=private", "--cgroupns=private", "--read-only"),
    *("--hostname=sandbox", "--user=0:0", "--workdir=/", "--ulimit=core=0"),
    *("--security-opt=no-new-privileges", "--cap-drop=ALL"),
    *(f"--cap-add={name}" for name in _CAPABILITIES),
)
_OF_PODMAN = (
    *(f"--{name}=0:{_FIRST_ID}:{_NUM_IDS}" for name in ("uidmap", "gidmap")),
    *("--read-only-tmpfs=false", "--no-hosts", "--passwd=false"),
    *(f"--ulimit={name}={_MOST_OPEN}:{_MOST_OPEN}" for name in ("nofile", "nproc")),
)
_COPY = "cp -R --preserve=mode,links,timestamps"
_FIRST = """set +m
exec 9<> <(:)  # nothing comes from it: to wait without a process
{fill} {copy} {at}/stage/. /work/ && chown -hR {user}:{user} {folders} \\
  && chmod 755 {folders} && printf 'ready\\n' || exit 1
exec 2>/dev/null
life=
as_user=(setpriv --reuid {user} --regid {user} --clear-groups)
start() {{
  find /tmp /dev/shm /dev/mqueue -xdev -mindepth 1 -delete
  chmod 1777 /tmp /dev/shm
  "${{as_user[@]}}" ipcrm --all
  ulimit -c 0; ulimit -f {blocks}; ulimit -v {kib}; ulimit -n {files}
  cd /work; unset $(compgen -e); export {variables}
  "${{as_user[@]}}" {shell} {pipes}
  kill -USR1 1
}}
finish() {{
  life=
  kill -KILL -1
  while set -- /proc/[0-9]*; [ $# -gt 1 ]; do read -r -t 0.01 -u 9; done
  printf 'ended\\n'
}}
look() {{
  pages=0
  for at in /proc/[0-9]*/statm; do read -r _ each _ <"$at" && ((pages += each)); done
  ((pages > {pages})) && over=1
}}
set -o posix  # then a signal ends `read`
trap over=1 USR1
word=
while true; do
  part=  # which a signal leaves as it was
  read -r -t 1 part
  code=$? word=$word$part  # a signal or the second may end it within a word
  case $code/$word in
    0/start) over= life=1; start 9<&- & ;;
    0/kill) over=1 ;;
    1/*) exit ;;
  esac
  [ $code = 0 ] && word=
  [ "$life" ] && look
  [ "$life" ] && [ "$over" ] && finish
done
"""
# An engine that could not start a container says 125 to 127. Podman does so at times
# where containers with users of their own start side by side on its storage "vfs"
# (containers/podman, issue 20332).
_TRIES = """for try in 1 2 3; do
  "$@"; code=$?
  case $code in 125|126|127) ;; *) break ;; esac
done
exit $code"""
# Says what an engine does not hold, as those do that discard a bound with a warning.
_PROBE = """exec 2>/dev/null
fail() {{ echo "$1"; exit 1; }}
cd /sys/fs/cgroup
for name in memory/memory.limit_in_bytes memory.max; do read -r bytes <$name; done
for name in pids/pids.max pids.max; do read -r tasks <$name; done
[ "$bytes" -le {bytes} ] && [ "$tasks" -le {tasks} ] \\
  || fail "it does not bound the memory and the processes of a container."
[ -e {at}/empty ] || fail "it does not see the files of this machine."
as_user() {{ setpriv --reuid {user} --regid {user} --clear-groups "$@"; }}
chown {user}:{user} /work && chmod 1777 /tmp /dev/shm \\
  && as_user touch /work/a /tmp/a /dev/shm/a \\
  || fail "a container cannot write its files."
for at in / /run /var/tmp /dev /etc /usr; do
  as_user test -w $at && fail "a container can write more than its files: $at."
done
as_user unshare --user true && fail "a container can make namespaces."
exit 0"""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A kind of boxes: containers of an engine."""

    name: str  # of its command
    others: tuple[tuple[str, ...], ...] = ()  # words that its command may need here
    is_mapped: bool = False  # a container's users are no others of this machine

    def holder(
        self,
        room: pathlib.Path,
        stage: pathlib.Path,
        image: image_lib.Image,
        shell: list[str],
        limits: limits_lib.Limits,
    ) -> list[str]:
        """Returns the command of a holder; see bubblewrap.py."""
        del stage  # lies beside the room
        folder = room.parent
        binds = {str(path): path for path in image.binds} | {_AT: folder}
        fill = ""
        if image.folder is not None:
            binds[_FOLDER] = image.folder
            fill = f"{_COPY} {_FOLDER}/. /work/ &&"
        words = [f"--name={folder.name}", *self._room(image, limits)]
        (folder / "empty").touch()
        (folder / "nothing").mkdir()
        for path in image.hidden:
            binds[str(path)] = folder / ("nothing" if path.is_dir() else "empty")
        script = _FIRST.format(
            at=_AT,
            blocks=-(-limits.disk_bytes // 512),  # as `ulimit` of POSIX counts
            copy=_COPY,
            files=_MOST_OPEN,
            fill=fill,
            folders=shlex.join(["/work", *image.folders]),
            kib=limits.memory_bytes // 1024,
            pages=int(limits.resident_bytes) // mmap.PAGESIZE,
            pipes=pipes.redirections(pathlib.Path(_AT)),
            shell=shlex.join(shell),
            user=_USER,
            variables=shlex.join(f"{k}={v}" for k, v in image_lib.VARIABLES.items()),
        )
        command = self._run(self._found[0], words, binds, script)
        return ["sh", "-c", _TRIES, "sh", *command]

    def kill(self, holder: int, tell: Callable[[bytes], object]) -> None:
        """Has the first process end the shell and all that it started."""
        del holder  # is a client, which has started none of them
        with contextlib.suppress(OSError):  # it may have ended
            tell(b"kill\n")

    def resident_bytes(self, holder: int) -> int:
        """Returns 0: the first process looks itself."""
        del holder
        return 0

    def seconds_to_close(self) -> float:
        """Returns the seconds that the engine has to drop a container."""
        return _SECONDS_TO_CLOSE

    def owner(self) -> int:
        """Returns the number of the user that opens a shell's pipes."""
        return _FIRST_ID if self.is_mapped else os.geteuid()

    def home(self, room: pathlib.Path) -> str:
        """Returns where the box's files are, as its shells see it."""
        del room  # is seen there
        return "/work"

    def missing(self) -> str:
        """Returns why the engine does not work here, "" if it does."""
        return self._found[1]

    @functools.cached_property
    def _found(self) -> tuple[list[str], str]:
        """Returns the engine's command, and why it does not work here, or ""."""
        if not shutil.which(self.name):
            return [], f"there is no {self.name}."
        if self.is_mapped and os.geteuid() != 0:
            return [], "it bounds files for root alone."
        reasons = []
        for words in ((), *self.others):
            command = [self.name, *words]
            if not (reason := self._try(command)):
                return command, ""
            reasons.append(f"{' '.join(command)}: {reason}")
        return [], "; ".join(reasons)

    def _try(self, command: list[str]) -> str:
        """Returns why a command of the engine runs no boxes, "" if it does."""
        limits, image = limits_lib.Limits(), container_files.image_name()
        script = _PROBE.format(
            at=_AT, bytes=_memory(limits), tasks=limits.num_processes, user=_USER
        )
        try:
            if _said([*command, "image", "inspect", image])[0]:
                tree = container_files.image()
                code, said = _said([*command, "import", "-", image], tree)
                if code:
                    return said
            with tempfile.TemporaryDirectory(prefix="glm5_jax_box_") as name:
                folder = pathlib.Path(name)
                folder.chmod(0o755)
                (folder / "empty").touch()
                words = self._room(image_lib.Image(), limits)
                code, said = _said(self._run(command, words, {_AT: folder}, script))
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"it could not be tried: {error}."
        return said if code else ""

    def _run(
        self,
        command: list[str],
        words: list[str],
        binds: dict[str, pathlib.Path],
        script: str,
    ) -> list[str]:
        """Returns the command that runs a container.

        Args:
            command: of the engine.
            words: more of its settings.
            binds: folders and files of this machine, by where they are seen.
            script: of its first process.
        """
        seen = {path: pathlib.Path(path) for path in _SEEN if os.path.exists(path)}
        mounts = [
            f"--mount=type=bind,source={path},destination={at},readonly"
            for at, path in {**seen, **binds}.items()
        ]
        if self.is_mapped:
            rules = binds[_AT] / "rules.json"
            rules.write_text(container_files.rules(tuple(command)))
            words = [*words, *_OF_PODMAN, f"--security-opt=seccomp={rules}"]
        image = container_files.image_name()
        return [*command, *_ISOLATED, *words, *mounts, image, "bash", "-c", script]

    def _room(self, image: image_lib.Image, limits: limits_lib.Limits) -> list[str]:
        """Returns the words of what a box may take, and where it can write."""
        sizes = [f"--{name}={_memory(limits)}" for name in ("memory", "memory-swap")]
        words = [*sizes, f"--pids-limit={limits.num_processes}"]
        parts = {"/work": _PARTS_OF_WORK, "/tmp": 1, "/dev/shm": 1}
        parts |= dict.fromkeys(image.folders, 1)
        blocks = limits.disk_bytes // mmap.PAGESIZE // sum(parts.values())
        files = max(limits.disk_bytes // _BYTES_OF_A_FILE, _LEAST_FILES)
        user = _USER + (_FIRST_ID if self.is_mapped else 0)
        for path, part in parts.items():
            options = f"nr_blocks={max(part * blocks, 1)},uid={user},gid={user}"
            options += f",nr_inodes={part * files // sum(parts.values())},nosuid,nodev"
            words.append(
                f"--mount=type=volume,destination={path},volume-opt=type=tmpfs,"
                f'volume-opt=device=tmpfs,"volume-opt=o={options}"'
            )
        return words


def _memory(limits: limits_lib.Limits) -> int:
    """Returns the bytes that a container may have, those of its files among them."""
    return int(limits.resident_bytes) + limits.disk_bytes


def _said(command: list[str], told: bytes = b"") -> tuple[int, str]:
    """Returns the code of a command and what it says."""
    done = subprocess.run(
        command, input=told, capture_output=True, timeout=_PROBE_SECONDS
    )
    said = (done.stdout + done.stderr).decode(errors="replace")
    return done.returncode, said.strip()
