"""Which sources run: a commit, or the version of a package."""

import functools
import pathlib
import subprocess

import glm5_jax

_SECONDS = 10.0  # for git, which may read a slow disk


@functools.cache
def commit() -> str:
    """Returns the commit of the sources when they began to run.

    "with changes" follows it if a file that git keeps has others. Where git knows none,
    it is "version 0.1.0".
    """
    package = pathlib.Path(glm5_jax.__file__).parent
    try:
        changed = _git(package, "status", "--porcelain", "--untracked-files=no")
        found = _git(package, "rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return f"version {glm5_jax.__version__}"
    return f"{found} with changes" if changed else found


def _git(package: pathlib.Path, *arguments: str) -> str:
    """Returns what a command of git prints.

    Raises:
      OSError: there is no git.
      SubprocessError: it fails, as where no repository is, or takes too long.
    """
    done = subprocess.run(
        ["git", "-C", str(package), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    return done.stdout.strip()
