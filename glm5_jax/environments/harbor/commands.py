"""Shell commands of task folders: what of them cannot be done in a box.

A box has no network and one user without rights. A command that installs packages of
Debian is left out where this machine has them, as boxes see its /usr; one that installs
modules of Python is done beforehand (modules.py).
"""

import dataclasses
import functools
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence

from glm5_jax.environments.harbor import modules

_APT = {"apt-get", "apt"}
_APT_NOTHING = {"update", "clean", "autoclean", "autoremove"}
_NETWORK = {
    *("curl", "wget", "uvx", "npx", "conda", "mamba", "apk", "yum", "dnf", "ssh"),
    *(
        "add-apt-repository",
        "rustup",
        "docker",
        "gem",
        "brew",
        "aria2c",
        "scp",
        "rsync",
    ),
}
# Programs of which some subcommands need the network.
_FETCHING = {
    "git": {"clone", "fetch", "pull", "submodule", "push"},
    "npm": {"install", "i", "ci", "exec"},
    "yarn": {"install", "add"},
    "pnpm": {"install", "add", "i"},
    "go": {"get", "install", "mod"},
    "cargo": {"install", "fetch", "add"},
    "uv": {"pip", "sync", "add", "run", "tool"},
    "bundle": {"install"},
    "composer": {"install", "require"},
}
_RIGHTS = {
    *("useradd", "adduser", "groupadd", "usermod", "chown", "chgrp", "mount", "mknod"),
    *("service", "systemctl", "locale-gen", "ldconfig", "su", "sudo", "sysctl"),
    *("update-alternatives", "dpkg-reconfigure", "chroot", "iptables"),
}
_PIP = {"pip", "pip3"}
_PIP_FLAGS = {
    *("--no-cache-dir", "--break-system-packages", "--upgrade", "-U", "-q", "--quiet"),
    *("--user", "--root-user-action=ignore", "--no-input"),
}
_LOCAL = re.compile(r"localhost|127\.0\.0\.1|\[?::1")
_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Judged:
    """A command that was looked at.

    Attributes:
        text: the command, with `true` for what this machine has done already.
        reasons: why it cannot be run in a box.
        modules: of Python, that it installs.
    """

    text: str
    reasons: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


def judge(text: str) -> Judged:
    """Looks at a command of a Dockerfile."""
    kept, reasons, found, at = [], [], [], 0
    for start, end in _pieces(text):
        words = _words(text[start:end])
        arguments = _pip_arguments(words)
        if arguments is None:
            is_done, why = _judge_words(words)
        else:
            is_done, why = True, _refused(arguments)
            found += [word for word in arguments if modules.is_requirement(word)]
        reasons += why
        if is_done:
            kept += [text[at:start], " true "]
            at = end
    whole = "".join([*kept, text[at:]])
    return Judged(whole, tuple(dict.fromkeys(reasons)), tuple(found))


def needs_network(script: str) -> tuple[str, ...]:
    """Returns the programs of a script that need the network or install something."""
    found = []
    for start, end in _pieces(script):
        words = _words(script[start:end])
        name = words[0].rpartition("/")[2] if words else ""
        if _fetches(name, words) or name in _APT or _pip_arguments(words) is not None:
            found.append(" ".join(words[:2]))
    return tuple(dict.fromkeys(found))


def _judge_words(words: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Returns whether a simple command is done already, and why it cannot be run."""
    if not words:
        return False, ()
    name = words[0].rpartition("/")[2]
    if name in _APT:
        return _judge_apt(words)
    if _fetches(name, words):
        return False, (f"`{' '.join(words[:2])}` needs the network",)
    if name in _RIGHTS:
        return False, (f"`{name}` needs rights that a box has not",)
    return False, ()


def _judge_apt(words: Sequence[str]) -> tuple[bool, Sequence[str]]:
    plain = [word for word in words[1:] if not word.startswith("-")]
    if plain[:1] == ["install"]:
        names = [name.partition("=")[0] for name in plain[1:]]
        missing = [name for name in names if not _has_package(name)]
        told = f"this machine lacks the packages {', '.join(missing)}; install them"
        return True, (told,) if missing else ()
    if plain[:1] and plain[0] in _APT_NOTHING:
        return True, ()
    return False, (f"`{' '.join(words[:2])}` needs rights that a box has not",)


def _pip_arguments(words: Sequence[str]) -> Sequence[str] | None:
    """Returns what follows `pip install`, None if that is not the command."""
    if words[1:3] == ["-m", "pip"]:
        words = words[2:]
    elif words[:2] == ["uv", "pip"]:
        words = words[1:]
    is_install = len(words) > 1 and words[0] in _PIP and words[1] == "install"
    return words[2:] if is_install else None


def _refused(arguments: Sequence[str]) -> list[str]:
    """Returns why arguments of `pip install` are not taken."""
    return [
        f"`pip install {word}` is not done here"
        for word in arguments
        if word not in _PIP_FLAGS and not modules.is_requirement(word)
    ]


def _fetches(name: str, words: Sequence[str]) -> bool:
    if any(_LOCAL.search(word) for word in words[1:]):
        return False
    plain = [word for word in words[1:] if not word.startswith("-")]
    subcommand = plain[0] if plain else ""
    if name == "git" and subcommand in _FETCHING["git"]:  # a folder may be cloned
        return any("://" in word or "@" in word for word in plain)
    return name in _NETWORK or subcommand in _FETCHING.get(name, ())


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of each simple command, by quotes and operators."""
    start, quote, i = 0, "", 0
    while i < len(text):
        letter = text[i]
        if letter == "\\":
            i += 1
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in ";&|\n(){}":
            yield start, i
            start = i + 1
        i += 1
    yield start, len(text)


def _words(piece: str) -> list[str]:
    """Returns the words of a command behind its settings of variables."""
    try:
        words = shlex.split(piece, comments=True)
    except ValueError:  # a quote that a here-document has alone
        return []
    begins = ("then", "do", "else", "if", "while", "until", "!", "exec", "time", "env")
    while words and (words[0] in begins or re.match(r"\w+=", words[0])):
        del words[0]
    return words


@functools.cache
def _has_package(name: str) -> bool:
    """Returns whether Debian's package is installed on this machine."""
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ", name]
    return "installed" in _output(query).split()


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
