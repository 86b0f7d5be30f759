"""A folder of this machine that is kept in step with a folder of a bucket.

Programs that lock, rename, append and sync files work in the folder; a thread uploads
what changes. A checkpoint goes up once its manifest is written, the manifest last, and
counts in the bucket from then on. The next start, here or elsewhere, fetches what the
bucket holds, unless this machine wrote it. The bucket's object `.owner` names the last
start; an earlier one that still runs sees it before its next upload, and ends.
"""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Iterable, Iterator

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.processes import folder_lock
from glm5_jax.storage import bucket as bucket_lib
from glm5_jax.storage import copies

OWNER = ".owner"
SECONDS = 10.0  # between two looks at the folder
_RECORD = "record.json"  # owners, and what was sent
_STAY = 2  # checkpoints
_LEFT = "left"  # what was here before another machine went on
Sent = dict[str, list[int]]  # size and time of modification by name


@contextlib.contextmanager
def in_step(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder of this machine; for an address, one that is kept in step.

    At the end everything is in the bucket, also where the block raises.

    Args:
      path: a folder, which is yielded itself, or an address.

    Raises:
      InputError: another process on this machine has the address, another start has
        taken it over meanwhile, or the bucket refuses. The folder is unchanged, and
        the same command uploads the rest.
    """
    if not bucket_lib.is_address(path):
        yield pathlib.Path(path).expanduser()
        return
    bucket = bucket_lib.Bucket(path)
    place = copies.home() / "runs" / bucket.local_name
    state = place.with_name(f"{place.name}.bucket")
    state.mkdir(parents=True, exist_ok=True)
    with folder_lock.held(state):
        keeper = _Keeper(bucket, place, state)
        logging.info("%s is kept in step with %s.", place, bucket.address)
        with keeper.running():
            yield place


class _Keeper:
    """Uploads what changes in a folder."""

    def __init__(
        self, bucket: bucket_lib.Bucket, place: pathlib.Path, state: pathlib.Path
    ) -> None:
        """Takes the address over and fetches what another machine left there."""
        self._bucket, self._place = bucket, place
        self._record = state / _RECORD
        self._ended = threading.Event()
        self._is_lost = False
        before = _read(self._record)
        owner, stored = bucket.read_text(OWNER), bucket.objects()
        stored.pop(OWNER, None)
        self._there = set(stored)
        self._sent: Sent = before["sent"]
        if owner is None or owner not in before["owners"]:
            self._fetch(stored, state)
        place.mkdir(parents=True, exist_ok=True)
        me = f"process {os.getpid()} on {socket.gethostname()}"
        self._owner = f"{secrets.token_hex(8)} {me}"
        # Both, as this process may end between this line and the next.
        self._owners = [self._owner, *before["owners"][:1]]
        self._save()
        bucket.write_text(OWNER, self._owner)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Uploads changes until the block ends, and then what is left."""
        thread = threading.Thread(target=self._keep, name="bucket", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._end(thread)
            try:
                self._finish()
            except (config_lib.InputError, OSError) as error:
                logging.error("%s", error)  # the block's own error counts
            raise
        self._end(thread)
        self._finish()

    def upload(self, is_last: bool = False) -> None:
        """Makes the bucket hold what the folder holds.

        Args:
          is_last: whether nobody changes the folder any more.

        Raises:
          InputError: another start has taken over, or the bucket refuses.
        """
        if (owner := self._bucket.read_text(OWNER)) != self._owner:
            self._is_lost = True
            raise config_lib.InputError(
                f"{self._bucket.address} has been taken over by {owner}. What this "
                f"process did since is in {self._place} and not in the bucket."
            )
        here = _to_keep(self._place)
        todo = [n for n in here if n not in self._there or self._sent.get(n) != here[n]]
        changed = {copies.step_of(name) for name in todo} - {None}
        for name in sorted(self._there):  # a step that is written again
            if copies.step_of(name) in changed and name.endswith(copies.MANIFEST):
                self._delete(name)
        for names in _in_order(todo):
            copies.in_parallel(lambda name: self._put(name, here), names, "uploaded")
        spared = set() if is_last else _spared(self._there, here)
        gone = {n for n in self._there - here.keys() if copies.step_of(n) not in spared}
        for names in reversed(_in_order(gone)):  # manifests before their steps
            copies.in_parallel(self._delete, names, "deleted")
        if todo or gone:
            self._save()

    def _put(self, name: str, here: Sent) -> None:
        try:
            self._bucket.upload(self._place / name, name)
        except FileNotFoundError:  # deleted meanwhile; so is its manifest
            return
        self._there.add(name)
        self._sent[name] = here[name]

    def _delete(self, name: str) -> None:
        self._bucket.delete(name)
        self._there.discard(name)
        self._sent.pop(name, None)

    def _keep(self) -> None:
        shown = ""
        while not self._ended.wait(SECONDS):
            try:
                self.upload()
                shown = ""
            except (config_lib.InputError, OSError) as error:
                if self._is_lost:
                    logging.error("%s", error)
                    os.kill(os.getpid(), signal.SIGTERM)  # as a preemption
                    return
                if str(error) != shown:
                    logging.warning("Not uploaded, to be tried again: %s", error)
                shown = str(error)

    def _end(self, thread: threading.Thread) -> None:
        self._ended.set()
        thread.join()

    def _finish(self) -> None:
        self.upload(is_last=True)
        if not self._there:  # a start that failed
            self._bucket.delete(OWNER)
        logging.info("Everything in %s is in %s.", self._place, self._bucket.address)

    def _fetch(self, stored: dict[str, bucket_lib.Stored], state: pathlib.Path) -> None:
        """Replaces the folder by what the bucket holds."""
        whole = copies.sealed(stored)
        wanted = {
            name: entry
            for name, entry in stored.items()
            if _is_whole(name, whole) and not name.startswith(".")
        }
        coming = state / "coming"
        copies.fetch(self._bucket, wanted, coming)
        for path in coming.glob(".fetched.*"):
            path.unlink()
        if self._place.exists():
            left = state / _LEFT
            shutil.rmtree(left, ignore_errors=True)
            self._place.rename(left)
            logging.warning(
                "%s was of an earlier start; it is now in %s.", self._place, left
            )
        coming.rename(self._place)
        self._sent = _to_keep(self._place)

    def _save(self) -> None:
        record = {"owners": self._owners, "sent": self._sent}
        files.write_text(self._record, json.dumps(record))


def _read(record: pathlib.Path) -> dict:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return {"owners": list(found["owners"]), "sent": dict(found["sent"])}
    except (OSError, ValueError, TypeError, KeyError):
        return {"owners": [], "sent": {}}


def _to_keep(place: pathlib.Path) -> Sent:
    """Returns the files that belong into the bucket: no hidden and no half ones."""
    found: Sent = {}
    for folder, folders, names in os.walk(place):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = pathlib.Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                if not name.startswith(".") and path.is_file():
                    stat = path.stat()
                    relative = path.relative_to(place).as_posix()
                    found[relative] = [stat.st_size, stat.st_mtime_ns]
    whole = copies.sealed(found)
    return {name: entry for name, entry in found.items() if _is_whole(name, whole)}


def _is_whole(name: str, sealed: set[tuple[str, int]]) -> bool:
    """Returns whether a file is of no checkpoint, or of one that has a manifest."""
    if copies.CHECKPOINTS not in name.split("/")[:-2]:
        return True
    return copies.step_of(name) in sealed


def _spared(there: Iterable[str], here: Iterable[str]) -> set[tuple[str, int]]:
    """Returns checkpoints that stay in the bucket although they are deleted here.

    A run keeps few, and the next one may be sealed and an old one deleted while the
    folder is listed: two stay in the bucket, so that one may be damaged. A rollback's
    abandoned steps are newer than those here, and go.
    """
    ours, spared = copies.sealed(here), set()
    for steps in copies.by_run(copies.sealed(there) - ours):
        run = next(iter(steps))[0]
        newest = sorted(step for step in ours if step[0] == run)[-_STAY:]
        older = sorted(step for step in steps if not newest or step < newest[-1])
        spared |= set(older[len(older) - _STAY + len(newest) :])
    return spared


def _is_manifest(name: str) -> bool:
    return name.endswith(copies.MANIFEST) and copies.step_of(name) is not None


def _in_order(names: Iterable[str]) -> list[list[str]]:
    """Sorts into what may go up together: whoever reads meanwhile finds no half."""
    ranks: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for name in sorted(names):
        if name.endswith("config.json"):
            ranks[0].append(name)
        elif copies.step_of(name) is None:
            ranks[3].append(name)
        else:
            ranks[1 + _is_manifest(name)].append(name)
    return list(ranks.values())
