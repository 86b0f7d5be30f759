"""The program: where it is, its command in the sandbox, and the fonts that it sees."""

import functools
import hashlib
import importlib.util
import pathlib
import shutil

from glm5_jax.environments import sandbox

_PROGRAMS = (
    "/usr/lib/chromium/chromium",  # Debian's; /usr/bin/chromium is a script
    "chromium-headless-shell",
    "chromium",
    "google-chrome",
)
_BINDS = ("/etc/fonts", "/var/cache/fontconfig")
_FONTS = "/usr/share/fonts", "/usr/local/share/fonts", "/etc/fonts"
# The namespaces of the sandbox take the place of Chromium's own ones. Without the
# others it asks the network for updates; the last ones make pixels repeatable.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic", "--disable-extensions"),
    *("--disable-background-timer-throttling", "--disable-renderer-backgrounding"),
    *("--disable-backgrounding-occluded-windows", "--disable-hang-monitor"),
    *("--force-color-profile=srgb", "--font-render-hinting=none"),
    *("--disable-lcd-text", "--hide-scrollbars", "--mute-audio"),
    *("--user-data-dir=/tmp/profile", "--remote-debugging-pipe", "about:blank"),
)


def command() -> list[str]:
    """Returns the command of a Chromium that speaks over descriptors 3 and 4."""
    program = _program()
    assert program is not None  # missing() says so
    return sandbox.confine([program, *_FLAGS], binds=_BINDS)


def missing() -> str:
    """Returns why pages cannot be rendered here and the remedy, "" if they can."""
    if importlib.util.find_spec("playwright") is None:
        return 'there is no playwright; install it: pip install "glm5_jax[browser]".'
    if importlib.util.find_spec("PIL") is None:
        return 'there is no Pillow; install it: pip install "glm5_jax[browser]".'
    if _program() is None:
        return "there is no Chromium; install it: apt-get install chromium."
    return ""


@functools.cache
def fonts() -> str:
    """Returns a digest of the fonts and their configuration, which decide geometry."""
    digest = hashlib.sha256()
    for folder in map(pathlib.Path, _FONTS):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(f"{path}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _program() -> str | None:
    found = (shutil.which(name) for name in _PROGRAMS)
    return next((path for path in found if path), None)
