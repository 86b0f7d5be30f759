"""A Chromium of the system without a network, a home or a file of the machine.

playwright drives it through pipes. It runs in namespaces of bubblewrap, so a page, or a
hole in the browser, reaches nothing but /usr and the pages' folder.
"""

import contextlib
import functools
import importlib.util
import pathlib
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from glm5_jax import config
from glm5_jax.environments.sandbox import bubblewrap

_CONFINED = (
    *("bwrap", "--unshare-all", "--unshare-user", "--die-with-parent"),
    *("--cap-drop", "ALL", "--clearenv", "--setenv", "HOME", "/tmp"),
    *("--setenv", "PATH", "/usr/bin:/bin", "--ro-bind", "/usr", "/usr"),
    *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"),
    *("--ro-bind-try", "/etc/fonts", "/etc/fonts"),
    *("--ro-bind-try", "/etc/chromium.d", "/etc/chromium.d"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--tmpfs", "/tmp", "--tmpfs", "/dev/shm"),
)
_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
_SIZE = {"width": 400, "height": 400}  # of the window, in pixels


def missing() -> str:
    """Returns what a browser lacks on this machine, "" if nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "there is no playwright; pip install playwright."
    if not shutil.which("chromium", path="/usr/bin"):
        return "there is no /usr/bin/chromium; install the package chromium."
    return bubblewrap.missing()


@contextlib.asynccontextmanager
async def opened(folder: pathlib.Path) -> AsyncIterator[Any]:
    """Yields an empty page of a browser of its own, and ends the browser.

    Args:
        folder: of the pages, all that the browser sees besides programs.

    Raises:
        config.InputError: the browser cannot be started here.
    """
    if reason := missing():
        raise config.InputError(f"These tasks need a browser, but {reason}")
    from playwright import async_api

    async with async_api.async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=_script(folder), args=_FLAGS
        )
        try:
            context = await browser.new_context(viewport=_SIZE, offline=True)
            yield await context.new_page()
        finally:
            await browser.close()


@functools.cache
def _script(folder: pathlib.Path) -> str:
    """Returns a program that takes Chromium's arguments and confines it."""
    command = [*_CONFINED, "--ro-bind", str(folder), str(folder), "/usr/bin/chromium"]
    path = pathlib.Path(tempfile.mkdtemp(prefix="glm5_jax_browser_")) / "chromium"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)
