"""Keeps compiled programs on disk, so that a second start compiles nothing.

Commands that run a model share the flag --compile_cache and call `enable` before their
first array. So may a notebook, which has no flags: it takes the flag's default. A
limit that compiling may exceed is told there too.
"""

import hashlib
import os
import pathlib
import platform

from absl import flags, logging

from glm5_jax.config import failures

MAX_BYTES = 4 * 2**30  # what has not been used for longest goes beyond it
_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_MIN_SECONDS = 0.3  # of a compilation that is worth a file
_FOLDER = flags.DEFINE_string(
    "compile_cache",
    "~/.cache/glm5_jax/programs",
    "Folder in which compiled programs are kept for the next start; 'none' keeps none. "
    f"{_VARIABLE}, where it is set, counts instead.",
)


def enable() -> None:
    """Makes jax look for compiled programs in the folder, and keep new ones there."""
    failures.warn_of_aborts()
    given = _FOLDER.value if flags.FLAGS.is_parsed() else _FOLDER.default
    if _VARIABLE in os.environ or given in ("none", "", None):
        return
    folder = pathlib.Path(given).expanduser() / _host()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prune(folder)
    except OSError as error:
        logging.warning("%s: compiled programs are not kept.", error)
        return
    import jax  # slow

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
    logging.info(
        "Compiled programs are kept in %s (--compile_cache=none keeps none).", folder
    )


def prune(folder: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Deletes what has not been read or written for longest until the others fit."""
    size = 0
    found = [(path, path.stat()) for path in folder.iterdir() if path.is_file()]
    used = lambda item: max(item[1].st_atime, item[1].st_mtime)
    for path, stat in sorted(found, key=used, reverse=True):
        size += stat.st_size
        if size > max_bytes:
            path.unlink(missing_ok=True)


def _host() -> str:
    """Names this kind of CPU, whose instructions programs for CPUs hold."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    features = next((x for x in lines if x.lower().startswith(("flags", "feat"))), "")
    digest = hashlib.sha256(f"{platform.processor()} {features}".encode())
    return f"{platform.machine()}-{digest.hexdigest()[:8]}"
