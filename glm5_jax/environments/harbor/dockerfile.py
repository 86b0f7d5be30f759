"""Reads a Dockerfile into steps that a box can do, and says what it cannot.

There are no images: a box sees /usr of this machine, which stands for the base where
that is Debian, Ubuntu or Python's own. Files are copied and commands run below the
folders of the box.
"""

import dataclasses
import fnmatch
import json
import pathlib
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping

from glm5_jax.environments.harbor import commands, instructions, modules

# Of this machine, or the kernel's: a box cannot write there.
FIXED = frozenset(
    ("usr", "etc", "bin", "sbin", "lib", "lib64", "proc", "dev", "sys", "boot", "run")
)
_IGNORED = {"LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL"}
_REGISTRIES = ("docker.io/", "public.ecr.aws/docker/", "mirror.gcr.io/", "library/")
_BASES = ("debian", "ubuntu", "python")
_VARIABLE = re.compile(r"(?<!\\)\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_MADE = re.compile(r"\bmkdir\b[^;&|\n]*")
_TOP = re.compile(r"(?<![\w/.$}])/([A-Za-z][\w.-]*)")
_ADDED = re.compile(r"://|^git@|\.(?:tar(?:\.\w+)?|tgz)$")
# Folders of the base, besides those of FIXED.
_THERE = ("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var")
PATH = "/usr/local/bin:/usr/bin:/bin"
_GIVEN = {"PATH": PATH, "HOME": "/root"}  # by a box
PYTHON_BIN = "/opt/python/bin"  # has `python`, as Python's images do


@dataclasses.dataclass(frozen=True)
class File:
    """A file that is copied."""

    content: bytes
    is_program: bool


@dataclasses.dataclass(frozen=True)
class Copy:
    """Files by their absolute paths in the box."""

    files: Mapping[str, File]


@dataclasses.dataclass(frozen=True)
class Run:
    """A command of the shell, its folder and its variables."""

    command: str
    workdir: str
    env: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Build:
    """What a Dockerfile makes of a box.

    Attributes:
        steps: in their order.
        workdir: where commands begin; "": the Dockerfile has none.
        env: variables of every command.
        modules: of Python, that pip installs.
        folders: top folders that files are copied to, or that are made.
        refusals: what cannot be done, by line.
    """

    steps: tuple[Copy | Run, ...]
    workdir: str
    env: Mapping[str, str]
    modules: tuple[str, ...]
    folders: frozenset[str]
    refusals: tuple[str, ...]


def read(path: pathlib.Path) -> Build:
    """Reads a Dockerfile, whose folder is the context of its copies.

    Raises:
        ValueError: a document has no end, or .dockerignore takes something back.
    """
    reader = _Reader(path.parent)
    for line, word, rest in instructions.read(path.read_text(encoding="utf-8")):
        reader.take(line, word, rest)
    return reader.build()


class _Reader:
    """The state behind the instructions that were read."""

    def __init__(self, context: pathlib.Path) -> None:
        self._context = context
        self._ignored = _ignored(context / ".dockerignore")
        self._steps: list[Copy | Run] = []
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._workdir = ""
        self._modules: list[str] = []
        self._folders: set[str] = set()  # of the top
        self._there = set(_THERE)  # folders that a step finds
        self._refusals: list[str] = []
        self._num_bases = 0

    def build(self) -> Build:
        """Returns what was read."""
        return Build(
            tuple(self._steps),
            self._workdir,
            dict(self._env),
            tuple(self._modules),
            frozenset(self._folders),
            tuple(self._refusals),
        )

    def take(self, line: int, word: str, rest: str) -> None:
        """Takes an instruction; refuses it if a box cannot do it."""
        take = {
            "FROM": self._take_base,
            "RUN": self._take_run,
            "COPY": self._take_copy,
            "ADD": self._take_add,
            "WORKDIR": self._take_workdir,
            "ENV": self._take_env,
            "ARG": self._take_arg,
            "USER": self._take_user,
        }.get(word)
        if take is not None:
            try:
                told = [*take(rest)]
            except ValueError as error:  # of a quote, or of JSON
                told = [f"{word} cannot be read: {error}"]
        elif word in _IGNORED:
            told = []
        else:
            told = [f"{word} is not done here"]
        self._refusals += [f"Dockerfile:{line}: {reason}" for reason in told]

    def _take_base(self, rest: str) -> Iterator[str]:
        self._num_bases += 1
        if self._num_bases > 1:
            yield "a second FROM; stages are not built here"
            return
        words = [word for word in rest.split() if not word.startswith("--")]
        base = self._expanded(words[0]) if words else ""
        name, _, tag = base.partition("@")[0].partition(":")
        for registry in _REGISTRIES:
            name = name.removeprefix(registry)
        if name not in _BASES:
            yield (
                f"the image {base} is not here: a box sees this machine's /usr, which "
                f"stands for {', '.join(_BASES)} alone"
            )
        elif name == "python":
            yield from self._take_python(tag)

    def _take_python(self, tag: str) -> Iterator[str]:
        wanted = re.match(r"\d+(?:\.\d+)?", tag)
        has = modules.python_version()
        if wanted and f"{has}.".startswith(f"{wanted[0]}."):
            made = f"mkdir -p {PYTHON_BIN}; ln -s $(command -v python3) "
            self._steps.append(Run(f"{made}{PYTHON_BIN}/python", "/", {}))
            self._env["PATH"] = f"{PYTHON_BIN}:{PATH}"
        else:
            yield f"the image python:{tag} is not here: /usr has Python {has or 'none'}"

    def _take_run(self, rest: str) -> Iterator[str]:
        if rest.startswith("--"):
            yield f"{rest.split()[0]} is not done here"
            return
        text = rest
        if rest.startswith("["):
            try:
                text = shlex.join(json.loads(rest))
            except (ValueError, TypeError):
                text = rest
        judged = commands.judge(text)
        yield from judged.reasons
        self._modules += judged.modules
        self._folders.update(_tops(text))
        self._there.update(map(self._at, _made(text)))
        env = {**self._args, **self._env}
        self._steps.append(Run(judged.text, self._workdir or "/", env))

    def _take_copy(self, rest: str) -> Iterator[str]:
        found = instructions.documents(rest.partition("\n")[0])
        if len(found) > 1:
            yield "several documents in one COPY are not done here"
            return
        if found and not found[0].start():
            yield from self._take_document(rest, found[0])
            return
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        flags = [word for word in words if word.startswith("--")]
        mode = ""
        for flag in flags:
            name, _, value = flag.partition("=")
            if name == "--chmod":
                mode = value
            elif name != "--link":
                yield f"{name} is not done here"
                return
        *names, target = (self._expanded(w) for w in words if w not in flags)
        files: dict[str, File] = {}
        for name in names:
            found = [p for p in _sources(self._context, name) if self._sees(p)]
            if not found:
                yield f"{name} is not in {self._context.name}/"
            is_folder = self._is_folder(target) or len(names) > 1 or len(found) > 1
            for path in found:
                files |= self._copied(path, target, is_folder)
        if mode:
            is_program = "x" in mode or mode.lstrip("0")[:1] in tuple("1357")
            files = {p: File(f.content, is_program) for p, f in files.items()}
        yield from self._add(files)

    def _take_add(self, rest: str) -> Iterator[str]:
        words = rest.replace('"', " ").replace(",", " ").split()
        if taken := [w for w in words if _ADDED.search(w)]:
            yield f"{taken[0]} is fetched or unpacked by ADD, which is not done here"
            return
        yield from self._take_copy(rest)

    def _take_document(self, rest: str, match: re.Match[str]) -> Iterator[str]:
        """Takes `COPY <<END PATH`, whose text follows on the next lines."""
        head, _, body = rest.partition("\n")
        text = body.removesuffix(match[2]).removesuffix("\n" + match[2])
        text = text if match[1] else self._expanded(text)
        target = self._expanded(head[match.end() :].strip())
        path = posixpath.join(target, match[2]) if self._is_folder(target) else target
        yield from self._add({self._at(path): File(text.encode(), False)})

    def _at(self, path: str) -> str:
        """Returns a path from the root."""
        at = posixpath.normpath(posixpath.join("/", self._workdir, path))
        return "/" + at.lstrip("/")  # normpath keeps two at the start

    def _is_folder(self, target: str) -> bool:
        """Returns whether a target of COPY is a folder by its form, or is one."""
        return target.endswith(("/", "/.")) or self._at(target) in self._there

    def _sees(self, path: pathlib.Path) -> bool:
        """Returns whether a file is of the context, and .dockerignore leaves it in."""
        if not path.resolve().is_relative_to(self._context.resolve()):
            return False  # a link leads out of it
        parts = path.relative_to(self._context).parts
        paths = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        return not any(fnmatch.fnmatch(p, q) for p in paths for q in self._ignored)

    def _copied(
        self, source: pathlib.Path, target: str, is_folder: bool
    ) -> dict[str, File]:
        """Returns the files of a source by their paths in the box."""
        at = self._at(target)
        if source.is_dir():  # its contents are copied, not itself
            paths = {
                f"{at}/{path.relative_to(source).as_posix()}": path
                for path in sorted(source.rglob("*"))
                if path.is_file() and self._sees(path)
            }
        else:
            paths = {f"{at}/{source.name}" if is_folder else at: source}
        return {
            self._at(path): File(file.read_bytes(), bool(file.stat().st_mode & 0o100))
            for path, file in paths.items()
        }

    def _add(self, files: Mapping[str, File]) -> Iterator[str]:
        fixed = [path for path in files if path.split("/")[1] in FIXED]
        if fixed:
            yield f"{fixed[0]} is of this machine, and a box cannot write there"
            return
        self._folders.update(p.split("/")[1] for p in files if p.count("/") > 1)
        self._there.update(f for p in files for f in _above(p))
        self._steps.append(Copy(files))

    def _take_workdir(self, rest: str) -> Iterator[str]:
        self._workdir = self._at(self._expanded(_unquoted(rest)))
        top = self._workdir.split("/")[1]
        if not top or top in FIXED:
            yield f"a box cannot work in {self._workdir}"
            return
        self._folders.add(top)
        self._there.update((self._workdir, *_above(self._workdir)))
        made = f"mkdir -p {shlex.quote(self._workdir)}"
        self._steps.append(Run(made, "/", {}))

    def _take_env(self, rest: str) -> Iterator[str]:
        words = shlex.split(rest)
        if words and "=" not in words[0]:  # the old form, ENV NAME the rest
            name, _, value = rest.partition(" ")
            words = [f"{name}={value.strip()}"]
        for word in words:
            name, _, value = word.partition("=")
            self._env[name] = self._expanded(value)
        yield from ()

    def _take_arg(self, rest: str) -> Iterator[str]:
        name, _, value = rest.strip().partition("=")
        self._args[name] = self._expanded(_unquoted(value))
        yield from ()

    def _take_user(self, rest: str) -> Iterator[str]:
        if rest.strip() not in ("root", "0", "root:root", "0:0"):
            yield f"the user {rest.strip()}: a box has one user"

    def _expanded(self, text: str) -> str:
        known = {**_GIVEN, **self._args, **self._env}
        return _VARIABLE.sub(
            lambda m: known.get(m[1] or m[3], m[2] or ""), text
        ).replace("\\$", "$")


def _ignored(path: pathlib.Path) -> list[str]:
    """Returns the patterns of a .dockerignore.

    Raises:
        ValueError: it takes something back by "!", which is not read here.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = [line.strip() for line in lines]
    found = [line for line in found if line and line[0] != "#"]
    if taken := [line for line in found if line[0] == "!"]:
        raise ValueError(f".dockerignore has {taken[0]}, which is not read here")
    names = [line.removeprefix("./").strip("/") for line in found]
    return [form for name in names for form in (name, name.removeprefix("**/"))]


def _sources(context: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Returns the files and folders of a source of COPY."""
    name = posixpath.normpath(name).lstrip("/")
    if name == "." or ".." in name.split("/"):
        return [context] if name == "." else []
    if not re.search(r"[*?\[]", name):
        found = [context / name] if (context / name).exists() else []
    else:
        found = [
            path
            for path in sorted(context.rglob("*"))
            if fnmatch.fnmatch(path.relative_to(context).as_posix(), name)
            and path.relative_to(context).as_posix().count("/") == name.count("/")
        ]
    return found


def _tops(command: str) -> set[str]:
    """Returns the top folders that a command makes."""
    made = " ".join(_MADE.findall(command))
    return {name for name in _TOP.findall(made) if name not in FIXED}


def _made(command: str) -> list[str]:
    """Returns the absolute paths of the folders that a command makes."""
    words = " ".join(_MADE.findall(command)).split()
    return [word for word in words if word.startswith("/")]


def _above(path: str) -> list[str]:
    """Returns the folders above a path."""
    return [at.as_posix() for at in pathlib.PurePosixPath(path).parents]


def _unquoted(text: str) -> str:
    return " ".join(shlex.split(text))
