"""Packages with their tests, fetched by the ordinary clients: pip, apt-get and npm.

A package is named "NAME==VERSION" (PyPI's source distribution), "debian:NAME" (the
original archive of Debian's source package), "npm:NAME@VERSION" or by a folder;
fetch_patched takes Debian's patches along. Archives are kept in ~/.cache/glm5_jax/swe,
and their sha256 stands in every task. pip runs the build code of a source distribution
outside of the sandbox, so it gets no variables but those that it needs.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping

from glm5_jax import config
from glm5_jax.environments.worlds.swe import records

DEBIAN, NPM = "debian:", "npm:"
_ADDITIONS = ".debian"  # the archive of a folder debian/
_MAX_BYTES = 2**25  # of a whole package
_SECONDS = 300
_ASIDE = re.compile(r"\s*$|W:|npm warn|\[notice\]|WARNING", re.IGNORECASE)
# Variables that pip gets: others may be keys, which a setup.py could read.
_OF_PIP = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|XDG_\w+|PIP_\w+|"
    r"SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_PROXY",
    re.IGNORECASE,
)
_DEBIAN_LIST = """Types: deb-src
URIs: http://deb.debian.org/debian
Suites: {suite}
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@dataclasses.dataclass(frozen=True)
class Package:
    """A package as it was published."""

    name: str
    version: str
    source: str  # name in its registry, with the sha256 of the archive
    files: records.Files

    @property
    def tree(self) -> str:
        """Returns the name of the folder that it is stored in."""
        return f"{self.name}-{self.version}"


def fetch(name: str, cache: pathlib.Path | None = None) -> Package:
    """Returns a package.

    Args:
        name: "NAME==VERSION", "debian:NAME", "npm:NAME@VERSION" or a folder.
        cache: folder of archives.

    Raises:
        config.InputError: there is no such package, or its archive is too large.
    """
    cache = cache or pathlib.Path.home() / ".cache" / "glm5_jax" / "swe"
    if name.startswith(DEBIAN):
        archive = _fetch_debian(name.removeprefix(DEBIAN), cache)
        title, _, version = archive.name.partition(".orig.tar")[0].partition("_")
    elif "==" in name:
        title, _, version = name.partition("==")
        archive = _fetch_pypi(title, version, cache)
    elif name.startswith(NPM):
        title, _, version = name.removeprefix(NPM).rpartition("@")
        archive = _fetch_npm(title, version, cache)
    elif pathlib.Path(name).is_dir():
        return _of_folder(pathlib.Path(name))
    else:
        raise config.InputError(
            f"{name!r} must be NAME==VERSION of PyPI, {DEBIAN}NAME, "
            f"{NPM}NAME@VERSION, or a folder that exists."
        )
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    where = {DEBIAN: f"{name}={version}", NPM: name}
    kind = next((kind for kind in where if name.startswith(kind)), "")
    where = where.get(kind, f"pypi:{name}")
    return Package(title, version, f"{where} sha256:{digest}", _unpack(archive))


def fetch_patched(
    name: str, cache: pathlib.Path | None = None
) -> tuple[Package, dict[str, str]]:
    """Returns a source package of Debian without its patches, and these in order.

    Args:
        name: of the package.
        cache: folder of archives.

    Raises:
        config.InputError: there is no such package, or its archive is too large.
    """
    cache = cache or pathlib.Path.home() / ".cache" / "glm5_jax" / "swe"
    folder = cache / "debian-patches" / name
    if not (archives := _archives(folder)):
        _download_debian(name, "--download-only", folder, cache)
        archives = _archives(folder)
    additions = sorted(folder.glob(f"*{_ADDITIONS}.tar.*"))
    if not archives or not additions:  # a package of Debian's own has no patches
        raise config.InputError(f"{DEBIAN}{name} is not of the format 3.0 (quilt).")
    title, _, version = additions[0].name.partition(_ADDITIONS)[0].partition("_")
    original = archives[0].read_bytes() + additions[0].read_bytes()
    digest = hashlib.sha256(original).hexdigest()
    source = f"{DEBIAN}{title}={version} sha256:{digest}"
    files = {p: t for p, t in _unpack(archives[0]).items() if p[:7] != "debian/"}
    package = Package(title, version, source, files)
    return package, _series(_unpack(additions[0]))


def _series(files: records.Files) -> dict[str, str]:
    """Returns the patches of a folder debian/ by name, in the order of its series."""
    lines = files.get("patches/series", b"").decode(errors="replace").splitlines()
    names = [line.split()[0] for line in lines if line.strip() and line[0] != "#"]
    found = {name: files.get(f"patches/{name}") for name in names}
    # What is not in UTF-8 is told by a patch that does not fit.
    return {k: v.decode(errors="replace") for k, v in found.items() if v is not None}


def _of_folder(path: pathlib.Path) -> Package:
    files = {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not {".git", "__pycache__"} & set(file.parts)
    }
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    name = path.resolve().name
    return Package(name, digest[:8], f"folder:{name} sha256:{digest}", files)


def _fetch_pypi(name: str, version: str, cache: pathlib.Path) -> pathlib.Path:
    folder = cache / "pypi" / f"{name}-{version}"
    if not (found := _archives(folder)):
        _run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", ":all:", "--dest", str(folder), f"{name}=={version}"),
            ],
            f"{name}=={version}",
            environ={k: v for k, v in os.environ.items() if _OF_PIP.fullmatch(k)},
        )
        found = _archives(folder)
    return found[0]


def _fetch_npm(name: str, version: str, cache: pathlib.Path) -> pathlib.Path:
    folder = cache / "npm" / f"{name}-{version}"
    if not (found := _archives(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        _run(["npm", "pack", "--silent", f"{name}@{version}"], name, folder)
        found = _archives(folder)
    return found[0]


def _fetch_debian(name: str, cache: pathlib.Path) -> pathlib.Path:
    folder = cache / "debian" / name
    if not (found := _archives(folder)):
        _download_debian(name, "--tar-only", folder, cache)
        found = _archives(folder)
    if not found:
        raise config.InputError(f"{DEBIAN}{name} has no archive *.orig.tar.*.")
    return found[0]


def _download_debian(
    name: str, part: str, folder: pathlib.Path, cache: pathlib.Path
) -> None:
    suite = re.search(r"VERSION_CODENAME=(\w+)", _read("/etc/os-release"))
    if not suite:
        raise config.InputError(f"{DEBIAN}{name} needs Debian's apt-get.")
    options = _private_lists(cache / "debian" / ".lists", suite[1])
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "apt-get",
        *options,
        "-qq",
        "source",
        "--download-only",
        part,
        name,
    ]
    _run(command, f"{DEBIAN}{name}", folder)


def _private_lists(folder: pathlib.Path, suite: str) -> list[str]:
    """Returns options of apt-get for lists of its own: the system's do not change."""
    parts, lists = folder / "parts", folder / "lists"
    options = [
        *("-o", "Dir::Etc::sourcelist=/dev/null"),
        *("-o", f"Dir::Etc::sourceparts={parts}"),
        *("-o", f"Dir::State::lists={lists}"),
        *("-o", "APT::Sandbox::User=root"),
    ]
    if not (folder / "done").exists():
        parts.mkdir(parents=True, exist_ok=True)
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        text = _DEBIAN_LIST.format(suite=suite)
        (parts / "own.sources").write_text(text, encoding="utf-8")
        _run(["apt-get", *options, "-qq", "update"], "apt-get update")
        (folder / "done").touch()
    return options


def _read(path: str) -> str:
    file = pathlib.Path(path)
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _archives(folder: pathlib.Path) -> list[pathlib.Path]:
    endings = (".tar.gz", ".tar.xz", ".tar.bz2", ".zip", ".tgz")
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    found = [
        f for f in files if f.name.endswith(endings) and f"{_ADDITIONS}." not in f.name
    ]
    return sorted(found, key=lambda file: ".orig.tar" not in file.name)


def _run(
    command: list[str],
    what: str,
    folder: pathlib.Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    try:
        subprocess.run(
            command,
            cwd=folder,
            env=environ,
            check=True,
            capture_output=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        is_ended = isinstance(error, subprocess.CalledProcessError)
        told = error.stderr.decode(errors="replace") if is_ended else ""
        lines = [line for line in told.splitlines() if not _ASIDE.match(line)]
        reason = (lines or [str(error)])[-1]
        raise config.InputError(f"{what} was not to be fetched: {reason}") from error


def _unpack(archive: pathlib.Path) -> records.Files:
    """Returns an archive's files without the folder that holds them all."""
    members = _zip_members if archive.suffix == ".zip" else _tar_members
    files, total = {}, 0
    for path, content in members(archive):
        total += len(content)
        if total > _MAX_BYTES:
            raise config.InputError(f"{archive.name} has more than {_MAX_BYTES} bytes.")
        is_inside = not path.startswith("/") and ".." not in path.split("/")
        if is_inside and len(content) <= records.MAX_FILE_BYTES:
            files[path] = content
    tops = {path.split("/")[0] for path in files}
    if len(tops) == 1 and all("/" in path for path in files):
        files = {path.split("/", 1)[1]: content for path, content in files.items()}
    return files


def _tar_members(archive: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.size <= _MAX_BYTES:
                opened = tar.extractfile(member)
                assert opened is not None  # it is a file
                yield member.name.removeprefix("./"), opened.read()


def _zip_members(archive: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if not info.is_dir() and info.file_size <= _MAX_BYTES:
                yield info.filename, opened.read(info)
