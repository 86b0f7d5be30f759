"""A checksum of every file of a step: manifest.json, written when the step is whole.

Orbax notices a file that is missing or cut short, when it comes to read it; a flipped
bit it hands on. The manifest has the size and the SHA-256 of every other file under the
step's folder, the step's number, and a checksum of itself. Why SHA-256, and who hashes
what: docs/design/0009-a-step-proves-itself.md.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import tqdm
from absl import logging
from etils import epath

from glm5_jax import config as config_lib

NAME = "manifest.json"
FOLDER = "checkpoints"  # of the steps of a run
HASH = "sha256"
_VERSION = 2
_WITHOUT_NUMBER = 1  # of an earlier version, or of a folder that is no run's step
_THREADS = min(4, os.cpu_count() or 1)  # hashlib gives up the interpreter's lock
_CHUNK = 2**20  # bytes
_MAX_NAMED = 5  # files that a message names
# As Orbax names what one process wrote: its data, its list of arrays.
_OF_PROCESS = re.compile(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)")


class Entry(NamedTuple):
    """What a file was when the step was written."""

    size: int  # bytes
    digest: str  # hexadecimal SHA-256


Entries = dict[str, Entry]  # by path relative to the step's folder


def seal(
    folder: epath.Path,
    process: int = 0,
    gather: Callable[[str], Sequence[str]] = lambda text: [text],
) -> None:
    """Hashes what is in a step's folder and writes its manifest, or neither.

    Every process hashes what it wrote, which is still in its page cache: were another
    to read it from the disk, it would hash what the disk made of it. Process 0 hashes
    what is nobody's and what somebody did not see, and writes. Files, folders and
    manifest are on the disk, not only on their way, when process 0 returns.

    Args:
      folder: of a step that Orbax has committed; all processes see it.
      process: number of this process.
      gather: gives process 0 what each process says, and the others nothing.

    Raises:
      OSError: something cannot be read or written.
    """
    mine = [name for name in files(folder) if _owner(name) == process]
    parts = gather(json.dumps(_hash(folder, mine, is_written=True)))
    if not parts:
        return
    entries: Entries = {}
    for part in parts:
        entries |= _entries(json.loads(part))
    sizes = files(folder)
    rest = [n for n, size in sizes.items() if n not in entries or entries[n][0] != size]
    entries |= _hash(folder, rest, is_written=True)
    entries = {name: entries[name] for name in sorted(sizes)}
    write_whole(folder / NAME, _render(entries, number_of(folder.name)))


def number_of(name: str) -> int | None:
    """The step that a folder of this name is; None: it is none, as 05 or Arabic digits.

    The same as Orbax would write it.
    """
    return int(name) if re.fullmatch("0|[1-9][0-9]{0,17}", name) else None


def is_sealed(folder: epath.Path) -> bool:
    """Returns whether there is a manifest, be it a good one."""
    return (folder / NAME).exists()


def read(folder: epath.Path) -> Entries | None:
    """Returns what a step's manifest says; None where it has none.

    Raises:
      DamagedError: it is not what was written, or the manifest of another step.
    """
    if not is_sealed(folder):
        return None
    try:
        text = (folder / NAME).read_text()
        content = json.loads(text)
        entries, step = _entries(content["files"]), content.get("step")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise config_lib.DamagedError(
            f"{folder / NAME} cannot be read: {error!r}."
        ) from error
    if text != _render(entries, step):
        raise config_lib.DamagedError(
            f"{folder / NAME} has another checksum than it says."
        )
    require_number(folder, step)
    return entries


def require_number(folder: epath.Path, step: int | None) -> None:
    """Checks that a run's folder has the number of the step in it; None: nothing says.

    A copy that lies elsewhere may have any name.

    Raises:
      DamagedError: it has another, as after a rename.
    """
    number = number_of(folder.name)
    is_of_run = folder.parent.name == FOLDER
    if is_of_run and None not in (number, step) and number != step:
        raise config_lib.DamagedError(
            f"{folder} holds step {step}, not step {number}; rename it to {step}."
        )


def verify(
    folder: epath.Path,
    without: Iterable[str] = (),
    process: int = 0,
    num_processes: int = 1,
) -> int | None:
    """Compares a step's files with its manifest: all sizes, then contents.

    Args:
      folder: of the step.
      without: folders in it that are left out, "state" for one.
      process: of those that share the work; each hashes its part.
      num_processes: that share it.

    Returns:
      Bytes that were hashed here; None where there is no manifest.

    Raises:
      DamagedError: files are missing or differ; it names them.
    """
    entries = read(folder)
    if entries is None:
        return None
    left_out = set(without)
    entries = {k: v for k, v in entries.items() if k.split("/")[0] not in left_out}
    try:
        require_sizes(folder, entries)
        mine = _share(entries, process, num_processes)
        found = _hash(folder, mine, is_shown=True)
    except OSError as error:
        raise config_lib.DamagedError(f"{folder} cannot be read: {error}.") from error
    differing = {n: "other content" for n in mine if found[n] != entries[n]}
    _require_same(folder, entries, differing)
    return sum(entries[name].size for name in mine)


def require_sizes(folder: epath.Path, entries: Entries) -> None:
    """Checks what is seen without reading files: they are there, and as long.

    Raises:
      DamagedError: some are not; it names them.
    """
    sizes = files(folder)
    problems = {
        name: f"{sizes[name]:,} bytes of {entry.size:,}" if name in sizes else "missing"
        for name, entry in entries.items()
        if sizes.get(name) != entry.size
    }
    _require_same(folder, entries, problems)


def files(folder: epath.Path) -> dict[str, int]:
    """Sizes of all files under a folder, its manifest excepted, by relative path."""
    found: dict[str, int] = {}
    folders = [(folder, "")]
    while folders:
        where, prefix = folders.pop()
        for path in where.iterdir():
            if path.is_dir():
                folders.append((path, f"{prefix}{path.name}/"))
            else:
                found[prefix + path.name] = path.stat().length
    return {k: v for k, v in found.items() if k not in (NAME, f"{NAME}.tmp")}


def write_whole(path: epath.Path, text: str) -> None:
    """Writes a file that is there whole or not at all, and outlives a power cut."""
    new = path.parent / f"{path.name}.tmp"
    try:
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    _sync_folder(path.parent)


def _owner(name: str) -> int:
    found = _OF_PROCESS.search(name)
    return int(found[1]) if found else 0


def _share(entries: Entries, process: int, num_processes: int) -> list[str]:
    """Deals files out, the largest first, to the process that has least."""
    loads = [0] * num_processes
    mine = []
    for name in sorted(entries, key=lambda name: (-entries[name].size, name)):
        owner = loads.index(min(loads))
        loads[owner] += entries[name].size
        if owner == process:
            mine.append(name)
    return mine


def _hash(
    folder: epath.Path,
    names: Sequence[str],
    is_written: bool = False,
    is_shown: bool = False,
) -> Entries:
    """Entries of these files; with `is_written` they are on the disk afterwards."""
    began = time.perf_counter()
    sizes = [(folder / name).stat().length for name in names]

    def digest(name: str) -> str:
        out = hashlib.new(HASH)
        with (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                out.update(chunk)
            if is_written:
                os.fsync(file.fileno())  # Orbax syncs arrays, but no JSON
        return out.hexdigest()

    entries = {}
    with (
        futures.ThreadPoolExecutor(_THREADS) as pool,
        tqdm.tqdm(
            total=sum(sizes),
            desc=f"verify {folder.name}",
            unit="B",
            unit_scale=True,
            delay=1.0,
            disable=None if is_shown else True,  # None: not on a terminal
        ) as bar,
    ):
        for name, size, hexed in zip(
            names, sizes, pool.map(digest, names), strict=True
        ):
            entries[name] = Entry(size, hexed)
            bar.update(size)
    if is_written:
        for parent in {(folder / name).parent for name in names} | {folder.parent}:
            _sync_folder(parent)
    seconds = time.perf_counter() - began
    logging.log(
        logging.INFO if names else logging.DEBUG,
        "Hashed %d files of %s: %.1f MB in %.3f s, %.2f GB/s.",
        *(len(names), folder, sum(sizes) / 1e6, seconds, sum(sizes) / seconds / 1e9),
    )
    return entries


def _require_same(
    folder: epath.Path, entries: Entries, problems: Mapping[str, str]
) -> None:
    if problems:
        named = [f"{n}: {problems[n]}" for n in sorted(problems)][:_MAX_NAMED]
        raise config_lib.DamagedError(
            f"{folder} is not what was written, in {len(problems)} of {len(entries)} "
            f"files: {'; '.join(named)}{'; ...' * (len(problems) > len(named))}."
        )


def _render(entries: Entries, step: int | None) -> str:
    """The text of a manifest; its checksum is that of the text without it."""
    content: dict[str, Any] = {"version": _WITHOUT_NUMBER, "hash": HASH}
    if step is not None:
        content |= {"version": _VERSION, "step": step}
    content["files"] = entries
    own = hashlib.new(HASH, json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "checksum": own}, indent=1) + "\n"


def _entries(files: Mapping[str, Sequence]) -> Entries:
    """Returns the entries as JSON gives them back: pairs."""
    return {name: Entry(*entry) for name, entry in files.items()}


def _sync_folder(folder: epath.Path) -> None:
    """Syncs a folder, so that names in it outlive a power cut, where it can be."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
