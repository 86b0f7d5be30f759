"""Checksums of a step's files: manifest.json, written when the step is complete.

Orbax notices a missing or truncated file when it reads it, but passes on a flipped bit.
The manifest holds the size and SHA-256 of every other file in the step's folder, the
step's number, and a checksum of itself. docs/design/0009-a-step-proves-itself.md says
why it is SHA-256, and which process hashes which files.
"""

import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import tqdm
from absl import logging
from etils import epath

from glm5_jax import config as config_lib
from glm5_jax import files as files_lib

NAME = "manifest.json"
FOLDER = "checkpoints"  # of the steps of a run
HASH = "sha256"
_VERSION = 2
_WITHOUT_NUMBER = 1  # written by earlier versions, or outside of a run
_THREADS = 4  # hashlib releases the GIL
_CHUNK = 2**20  # bytes
_MAX_NAMED = 5  # files listed in a message
# The manifest, and the temporary file that a killed process may leave.
_OWN = re.compile(r"manifest\.json(\.tmp)?|\.manifest-\w+\.json")
# Orbax's names for one process's data and list of arrays.
_OF_PROCESS = re.compile(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)")


class Entry(NamedTuple):
    """Size and digest of a file when it was written."""

    size: int  # bytes
    digest: str  # hexadecimal SHA-256


Entries = dict[str, Entry]  # by path relative to the step's folder


def seal(
    folder: epath.Path,
    process: int = 0,
    gather: Callable[[str], Sequence[str]] = lambda text: [text],
) -> None:
    """Hashes the files of a step and writes its manifest.

    Each process hashes the files that it wrote, from its page cache: another process
    would hash what the disk made of them. Process 0 hashes the remaining files and
    those that their writer did not see, and writes the manifest. When process 0
    returns, files, folders and manifest are synced to disk.

    Args:
      folder: of a step that Orbax has committed, visible to all processes.
      process: number of this process.
      gather: returns every process's value on process 0, and nothing elsewhere.

    Raises:
      OSError: a file cannot be read or written.
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
    files_lib.write_text(
        pathlib.Path(folder / NAME), _render(entries, number_of(folder.name))
    )


def number_of(name: str) -> int | None:
    """Returns the step of a folder name; None unless Orbax would write it so ("05")."""
    return int(name) if re.fullmatch("0|[1-9][0-9]{0,17}", name) else None


def is_sealed(folder: epath.Path) -> bool:
    """Returns whether a manifest exists, valid or not."""
    return (folder / NAME).exists()


def read(folder: epath.Path) -> Entries | None:
    """Returns the entries of a step's manifest, or None without a manifest.

    Raises:
      DamagedError: the manifest is invalid, or belongs to another step.
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
            f"{folder / NAME} does not match its own checksum."
        )
    require_number(folder, step)
    return entries


def require_number(folder: epath.Path, step: int | None) -> None:
    """Checks that a step's folder in a run is named by the step's number.

    A copy outside of a run may have any name. A `number` of None is not checked.

    Raises:
      DamagedError: the folder has another number, for example after a rename.
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
      without: subfolders to skip, such as "state".
      process: number of this process; each hashes its share.
      num_processes: processes that share the work.

    Returns:
      Bytes that this process hashed; None without a manifest.

    Raises:
      DamagedError: lists files that are missing or differ.
    """
    entries = read(folder)
    if entries is None:
        return None
    left_out = set(without)
    entries = {k: v for k, v in entries.items() if k.split("/")[0] not in left_out}
    try:
        require_sizes(folder, entries)
        mine = _share(entries, process, num_processes)
        found = _hash(folder, mine, is_written=False)
    except OSError as error:
        raise config_lib.DamagedError(f"{folder} cannot be read: {error}.") from error
    differing = {n: "other content" for n in mine if found[n] != entries[n]}
    _require_same(folder, entries, differing)
    return sum(entries[name].size for name in mine)


def require_sizes(folder: epath.Path, entries: Entries) -> None:
    """Checks that all files exist with their sizes, without reading them.

    Raises:
      DamagedError: lists files that are missing or have another size.
    """
    sizes = files(folder)
    problems = {
        name: f"{sizes[name]:,} of {entry.size:,} bytes" if name in sizes else "missing"
        for name, entry in entries.items()
        if sizes.get(name) != entry.size
    }
    _require_same(folder, entries, problems)


def files(folder: epath.Path) -> dict[str, int]:
    """Returns the sizes of all files but the manifest, by relative path."""
    found: dict[str, int] = {}
    folders = [(folder, "")]
    while folders:
        where, prefix = folders.pop()
        for path in where.iterdir():
            if path.is_dir():
                folders.append((path, f"{prefix}{path.name}/"))
            else:
                found[prefix + path.name] = path.stat().length
    return {k: v for k, v in found.items() if not _OWN.fullmatch(k)}


def _owner(name: str) -> int:
    found = _OF_PROCESS.search(name)
    return int(found[1]) if found else 0


def _share(entries: Entries, process: int, num_processes: int) -> list[str]:
    """Assigns files to processes, the largest first, to balance their bytes."""
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
    is_written: bool,
) -> Entries:
    """Hashes files that were just written, and syncs them, or files to verify."""
    began = time.perf_counter()
    sizes = [(folder / name).stat().length for name in names]

    def digest(name: str) -> str:
        out = hashlib.new(HASH)
        with (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                out.update(chunk)
            if is_written:
                os.fsync(file.fileno())  # Orbax syncs arrays but not JSON
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
            disable=is_written or None,  # None: where there is no terminal
        ) as bar,
    ):
        for name, size, hexed in zip(
            names, sizes, pool.map(digest, names), strict=True
        ):
            entries[name] = Entry(size, hexed)
            bar.update(size)
    if is_written:
        for parent in {(folder / name).parent for name in names} | {folder.parent}:
            files_lib.sync_folder(parent)
    seconds = time.perf_counter() - began
    logging.log(
        logging.INFO if names else logging.DEBUG,
        "Hashed %d files of %s: %.1f MB in %.3f s, %.2f GB/s.",
        len(names),
        folder,
        sum(sizes) / 1e6,
        seconds,
        sum(sizes) / seconds / 1e9,
    )
    return entries


def _require_same(
    folder: epath.Path, entries: Entries, problems: Mapping[str, str]
) -> None:
    if problems:
        named = [f"{n}: {problems[n]}" for n in sorted(problems)][:_MAX_NAMED]
        raise config_lib.DamagedError(
            f"{folder} differs from its manifest in {len(problems)} of {len(entries)} "
            f"files: {'; '.join(named)}{'; ...' * (len(problems) > len(named))}."
        )


def _render(entries: Entries, step: int | None) -> str:
    """Renders a manifest, with the checksum of its text without the checksum."""
    content: dict[str, Any] = {"version": _WITHOUT_NUMBER, "hash": HASH}
    if step is not None:
        content |= {"version": _VERSION, "step": step}
    content["files"] = entries
    own = hashlib.new(HASH, json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "checksum": own}, indent=1) + "\n"


def _entries(files: Mapping[str, Sequence]) -> Entries:
    """Returns the entries as pairs, as JSON reads them."""
    return {name: Entry(*entry) for name, entry in files.items()}
