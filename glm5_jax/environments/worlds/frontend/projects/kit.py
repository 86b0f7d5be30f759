"""The packages of projects: fetched by npm once, kept, and seen by boxes, read-only.

package-lock.json names the exact version and the digest of each, so that every
machine builds with the same ones. They are kept in ~/.cache/glm5_jax/frontend; no
script of theirs runs.
"""

import atexit
import functools
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import subprocess
import tempfile

from glm5_jax import config
from glm5_jax.environments.worlds.frontend.projects import frameworks

LOCK = pathlib.Path(__file__).parent / "package-lock.json"
_SECONDS = 600
_REMEDY = (
    "projects of React and Vue need node and npm (apt-get install npm) and, once on "
    "this machine, the network"
)


def package() -> str:
    """Returns the package.json of all frameworks, which the lock is of."""
    versions: dict[str, str] = {}
    for framework in frameworks.ALL.values():
        versions |= framework.versions
    kit = {
        "name": "kit",
        "private": True,
        "dependencies": dict(sorted(versions.items())),
    }
    return json.dumps(kit, indent=2) + "\n"


def missing() -> str:
    """Returns why projects cannot be built here and the remedy, "" if they can."""
    try:
        folder()
    except config.InputError as error:
        return str(error)
    return ""


@functools.cache
def folder() -> pathlib.Path:
    """Returns a folder with node_modules.

    Raises:
        config.InputError: it is not there, and npm cannot fetch it.
    """
    if not shutil.which("node", path="/usr/bin:/usr/local/bin"):
        raise config.InputError(f"there is no node in /usr/bin: {_REMEDY}.")
    key = hashlib.sha256(LOCK.read_bytes() + package().encode()).hexdigest()[:16]
    cache = pathlib.Path.home() / ".cache" / "glm5_jax" / "frontend" / key
    if not cache.is_dir():
        _install(cache)
    if os.geteuid() != 0:
        return cache
    # Root's boxes run as another user, who cannot enter root's folders.
    target = pathlib.Path(tempfile.mkdtemp(prefix="glm5_jax_kit_"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    target.chmod(0o755)
    shutil.copytree(
        cache, target, symlinks=True, dirs_exist_ok=True, copy_function=_link
    )
    return target


def _install(cache: pathlib.Path) -> None:
    """Fetches the packages into a folder.

    Raises:
        config.InputError: npm cannot.
    """
    partial = cache.with_name(f"{cache.name}.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        shutil.copyfile(LOCK, partial / LOCK.name)
        (partial / "package.json").write_text(package(), encoding="utf-8")
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(
            command, cwd=partial, check=True, capture_output=True, timeout=_SECONDS
        )
        for path in (partial, *partial.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        partial.rename(cache)
    except (OSError, subprocess.SubprocessError) as error:
        if cache.is_dir():  # another process was faster
            return
        told = (getattr(error, "stderr", b"") or b"").decode(errors="replace")
        reason = (told.strip().splitlines() or [str(error)])[0]
        raise config.InputError(f"npm failed ({reason}): {_REMEDY}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _link(source: str, target: str) -> str:
    """Links a file, or copies it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
