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
import tempfile
import threading
import time
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
_MADE = {"config.json", "plan.json"}  # of a run, of a preparation
_GROWING = ".jsonl"
_LAST = {"index.json", "summary.json"}  # name what must be there
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
    """Uploads what changes in a folder, and deletes what it uploaded or fetched."""

    def __init__(
        self, bucket: bucket_lib.Bucket, place: pathlib.Path, state: pathlib.Path
    ) -> None:
        """Takes the address over and fetches what another machine left there."""
        self._bucket, self._place, self._state = bucket, place, state
        self._ended = threading.Event()
        self._lost: config_lib.InputError | None = None
        before = _read(state / _RECORD)
        owner = self._before = bucket.read_text(OWNER)
        me = f"process {os.getpid()} on {socket.gethostname()}"
        self._owner = f"{secrets.token_hex(8)} {me}"
        self._sent: Sent = before["sent"]
        if owner in before["owners"] and (place.exists() or not self._sent):
            self._save(owner)  # both: this process may end between the two lines
            bucket.write_text(OWNER, self._owner)
        else:
            if owner is None:
                _require_own(bucket)
            # Before it looks: the earlier start must not change what is fetched.
            bucket.write_text(OWNER, self._owner)
            self._fetch()
        place.mkdir(parents=True, exist_ok=True)

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
                if self._lost is not None:  # another exit code: not to be started again
                    raise self._lost from error
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
        self._require_owner()
        here = _to_keep(self._place)
        todo = {name for name in here if self._sent.get(name) != here[name]}
        gone = self._sent.keys() - here.keys()
        if not todo and not gone:
            return
        there = set(self._bucket.objects())
        todo |= here.keys() - there
        first, steps, manifests, last = _in_order(todo)
        self._put_all(first, here)
        stale = _stale(there, here)
        self._delete_all(n for n in there if copies.step_of(n) in stale)
        again = {copies.step_of(name) for name in (*steps, *manifests)}
        old = {name for name in there if copies.step_of(name) in again}
        # A step that is written again counts no more until it is whole.
        self._delete_all(n for n in old if n not in here or _is_manifest(n))
        self._put_all(steps, here)
        self._require_owner()
        sealed = [n for n in here if _is_manifest(n) and copies.step_of(n) in again]
        self._put_all(sealed, here)
        self._put_all(last, here)
        spared = _spared(self._sent, here, is_last)
        gone &= self._sent.keys()
        self._delete_all(n for n in gone if copies.step_of(n) not in spared)
        self._save()

    def _require_owner(self) -> None:
        owner = self._bucket.read_text(OWNER)
        if owner != self._owner:
            self._lost = config_lib.InputError(
                f"{self._bucket.address} has been taken over by {owner or 'nobody'} "
                f"(its object {OWNER}). What this process did since is in "
                f"{self._place} and not in the bucket."
            )
            raise self._lost

    def _put_all(self, names: Iterable[str], here: Sent) -> None:
        copies.in_parallel(lambda n: self._put(n, here), sorted(names), "uploaded")

    def _put(self, name: str, here: Sent) -> None:
        path = self._place / name
        try:
            if path.suffix == _GROWING:  # gcsfs fixes the size before it reads
                with tempfile.NamedTemporaryFile(dir=self._state) as snapshot:
                    shutil.copyfile(path, snapshot.name)
                    self._bucket.upload(pathlib.Path(snapshot.name), name)
            else:
                self._bucket.upload(path, name)
        except (FileNotFoundError, config_lib.InputError):
            if not path.exists():  # deleted meanwhile
                return
            raise
        self._sent[name] = here[name]

    def _delete_all(self, names: Iterable[str]) -> None:
        manifests_first = sorted(names, key=lambda name: not _is_manifest(name))
        count = sum(map(_is_manifest, manifests_first))
        for part in (manifests_first[:count], manifests_first[count:]):
            copies.in_parallel(self._delete, part, "deleted")

    def _delete(self, name: str) -> None:
        self._bucket.delete(name)
        self._sent.pop(name, None)

    def _keep(self) -> None:
        shown = ""
        while not self._ended.wait(SECONDS):
            try:
                self.upload()
                shown = ""
            except Exception as error:  # the run goes on, and so does this thread
                if self._lost is not None:
                    logging.error("%s", error)
                    if not self._ended.is_set():  # else the block has its error
                        os.kill(os.getpid(), signal.SIGTERM)  # as a preemption
                    return
                if str(error) != shown:
                    logging.warning("Not uploaded, to be tried again: %s", error)
                shown = str(error)

    def _end(self, thread: threading.Thread) -> None:
        self._ended.set()
        thread.join()

    def _finish(self) -> None:
        """Uploads what is left, unless nothing was ever here."""
        if self._lost is not None:
            raise self._lost
        try:
            self.upload(is_last=True)
            if self._before is None and not self._sent:  # a start that failed
                self._bucket.delete(OWNER)
        except config_lib.InputError as error:
            if self._lost is not None:
                raise
            raise config_lib.InputError(
                f"{error} The run is whole in {self._place}; the same command on this "
                f"machine uploads the rest."
            ) from error
        logging.info("Everything in %s is in %s.", self._place, self._bucket.address)

    def _fetch(self) -> None:
        """Replaces the folder by what the bucket holds."""
        stored = self._bucket.objects()
        whole = copies.sealed(stored)
        wanted = {
            name: entry
            for name, entry in stored.items()
            if _is_whole(name, whole) and not name.startswith(".")
        }
        coming = self._state / "coming"
        copies.fetch(self._bucket, wanted, coming)
        for path in coming.glob(".fetched.*"):
            path.unlink()
        if self._place.exists():
            left = self._state / f"left_{time.strftime('%Y%m%d-%H%M%S')}"
            self._place.rename(left)
            logging.warning(
                "%s was of an earlier start; it is now in %s.", self._place, left
            )
        coming.rename(self._place)
        self._sent = _to_keep(self._place)
        self._save()

    def _save(self, *others: str | None) -> None:
        record = {"owners": [self._owner, *others], "sent": self._sent}
        files.write_text(self._state / _RECORD, json.dumps(record))


def _require_own(bucket: bucket_lib.Bucket) -> None:
    """Checks that a folder that no start has taken is empty or was made by one."""
    names = bucket.objects()
    if names and not names.keys() & _MADE:
        raise config_lib.InputError(
            f"{bucket.address} is not empty and holds neither a run nor a preparation; "
            f"give another address, so that nothing there is overwritten."
        )


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
    # Retention renames a step before it deletes it, maybe while it was listed.
    whole = {
        (run, number)
        for run, number in copies.sealed(found)
        if (place / run / copies.CHECKPOINTS / str(number) / copies.MANIFEST).exists()
    }
    return {name: entry for name, entry in found.items() if _is_whole(name, whole)}


def _is_whole(name: str, sealed: set[tuple[str, int]]) -> bool:
    """Returns whether a file is of no checkpoint, or of one that has a manifest."""
    if copies.CHECKPOINTS not in name.split("/")[:-2]:
        return True
    return copies.step_of(name) in sealed


def _stale(there: Iterable[str], here: Iterable[str]) -> set[tuple[str, int]]:
    """Returns checkpoints in the bucket that are newer than those of their run here.

    A rollback left them behind, or an earlier start sealed them after it was overtaken.
    """
    ours = copies.sealed(here)
    newest = dict(sorted(ours))
    return {
        (run, number)
        for run, number in copies.sealed(there) - ours
        if number > newest.get(run, number)
    }


def _spared(
    sent: Iterable[str], here: Iterable[str], is_last: bool
) -> set[tuple[str, int]]:
    """Returns checkpoints that stay in the bucket although they are deleted here.

    A run keeps few, and the next one may be sealed and an old one deleted while the
    folder is listed: two stay in the bucket, so that one may be damaged. If there is
    none here, all stay.
    """
    ours, spared = copies.sealed(here), set()
    for steps in copies.by_run(copies.sealed(sent) - ours):
        run = next(iter(steps))[0]
        newest = sorted(step for step in ours if step[0] == run)[-_STAY:]
        older = sorted(step for step in steps if not newest or step < newest[-1])
        if not newest:
            spared |= steps
        elif not is_last:
            spared |= set(older[max(0, len(older) - _STAY + len(newest)) :])
    return spared


def _is_manifest(name: str) -> bool:
    return name.endswith(copies.MANIFEST) and copies.step_of(name) is not None


def _in_order(names: Iterable[str]) -> list[list[str]]:
    """Sorts into small files, steps, manifests, and files that name the others."""
    ranks: list[list[str]] = [[] for _ in range(4)]
    for name in names:
        if copies.step_of(name) is not None:
            ranks[1 + _is_manifest(name)].append(name)
        else:
            ranks[3 * (name.split("/")[-1] in _LAST)].append(name)
    return ranks
