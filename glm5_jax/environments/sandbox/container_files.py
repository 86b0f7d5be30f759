"""What a container engine is given: the image, and the rules of system calls.

The image is a few empty folders and links; all else of a box is mounted.
"""

import functools
import hashlib
import io
import json
import pathlib
import subprocess
import tarfile
from typing import Any

_LINKS = ("bin", "sbin", "lib", "lib64")  # into /usr
_FOLDERS = ("usr", "etc", "proc", "sys", "dev", "run", "work", "tmp")
PRIVATE = "box"  # a folder that the user of a box's shells cannot enter
_FORBIDDEN = {
    *("unshare", "setns", "clone", "clone3", "pivot_root"),
    *("mount", "umount", "umount2", "mount_setattr", "move_mount", "open_tree"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "keyctl", "add_key", "request_key"),
}
_SECONDS = 60
_NAMESPACES = 0x7E020000  # the flags of clone that make them
_CLONE = {
    "names": ["clone"],
    "action": "SCMP_ACT_ALLOW",
    "args": [
        {"index": 0, "value": _NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    ],
}


@functools.cache
def image() -> bytes:
    """Returns the image's files, as tar packs them."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in (*_FOLDERS, PRIVATE):
            folder = tarfile.TarInfo(name)
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o700 if name == PRIVATE else 0o755
            archive.addfile(folder)
        for name in _LINKS:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
    return packed.getvalue()


def image_name() -> str:
    """Returns the image's name, which tells its content."""
    return f"glm5_jax_box:{hashlib.sha256(image()).hexdigest()[:12]}"


@functools.cache
def rules(command: tuple[str, ...]) -> str:
    """Returns podman's rules of system calls without what makes namespaces.

    Docker's own forbid that to who lacks privileges.

    Args:
        command: of podman.

    Raises:
        OSError: it has no rules.
    """
    ask = [*command, "info", "--format={{.Host.Security.SECCOMPProfilePath}}"]
    path = subprocess.run(ask, capture_output=True, text=True, timeout=_SECONDS).stdout
    return without_namespaces(pathlib.Path(path.strip()).read_text(encoding="utf-8"))


def without_namespaces(told: str) -> str:
    """Returns rules, in the engines' JSON, without what makes namespaces and mounts."""
    found: dict[str, Any] = json.loads(told)
    kept = [
        {**rule, "names": [name for name in rule["names"] if name not in _FORBIDDEN]}
        for rule in found["syscalls"]
    ]
    found["syscalls"] = [*(rule for rule in kept if rule["names"]), _CLONE]
    return json.dumps(found)
