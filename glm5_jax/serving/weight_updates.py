"""Replaces the weights over HTTP, in vLLM's words, from files that a trainer wrote.

    POST /start_weight_update
    POST /update_weights {"update_info": {"path": "step_100"}}
    POST /finish_weight_update {"weight_version": 7}

Trainers may follow each other faster than a server reads: one gives up, or ends, while
the server still reads its weights. So what a later update meets is forgotten, and a
trainer may name the weights that it finishes by the "update_info" of before.

A version of a weight store may come into sight late, as on NFS: it is waited for. The
files are read beside the running engine. It takes them, whole and between two
dispatches, only at the end; whatever fails before changes nothing. A trainer that wants
no token of the old weights afterwards sends /pause before and /resume after.
"""

import asyncio
import pathlib
from typing import Any

from absl import logging

from glm5_jax.http_server import errors
from glm5_jax.serving import bodies, new_weights, served

START, UPDATE = "/start_weight_update", "/update_weights"
FINISH = "/finish_weight_update"
_MAX_VERSION = 2**31 - 1


class UpdateInfo(bodies.Body):
    """The place of new weights."""

    path: str


class UpdateBody(bodies.Body):
    """The body of /update_weights."""

    update_info: UpdateInfo


class FinishBody(bodies.Body):
    """The body of /finish_weight_update."""

    weight_version: int | str | None = None  # None takes the next one
    update_info: UpdateInfo | None = None  # what must have been read; None: whatever
    clear_cache: bool = False  # running requests read their tokens again


class Updates:
    """The update of a server's weights that is under way, if any."""

    def __init__(self, model: served.Served) -> None:
        """Begins no update yet."""
        self._model = model
        self._has_started = False
        self._reading: asyncio.Task[new_weights.Coming] | None = None
        self._is_wanted = False  # what is being read; a later update makes it False
        self._last = new_weights.Last()
        # Read from a path, but not published.
        self._coming: tuple[pathlib.Path, new_weights.Coming] | None = None

    def start(self) -> dict[str, Any]:
        """Begins an update; one that was not finished is forgotten.

        Raises:
            ApiError: updates are not allowed, or weights are being read, which are
                forgotten, too.
        """
        self._folder()
        self._is_wanted = False
        if self._reading is not None:
            raise errors.ApiError(
                409, "Weights are still being read, which are forgotten; send it again."
            )
        self._has_started, self._coming = True, None
        return {"status": "started"}

    async def update(self, body: UpdateBody) -> dict[str, Any]:
        """Reads weights into memory, while the engine continues with the old ones.

        Raises:
            ApiError: the path is not allowed, or no update has begun, or another one
                came meanwhile.
            InputError: no weights of this model are there.
        """
        path = self._path(body.update_info.path)
        self._is_wanted = False
        if not self._has_started or self._reading is not None:
            raise errors.ApiError(
                409, f"Send {START} first, and one {UPDATE} after the other."
            )
        self._is_wanted, self._coming = True, None
        # A client that leaves ends its request, not the thread that reads.
        self._reading = asyncio.create_task(self._read(path))
        self._reading.add_done_callback(self._has_read)
        coming = await asyncio.shield(self._reading)
        if not self._is_wanted:
            raise errors.ApiError(
                409, "Another update came meanwhile, so these weights are forgotten."
            )
        self._coming = path, coming
        return {"status": "read"}

    async def _read(self, path: pathlib.Path) -> new_weights.Coming:
        """Reads weights; returns them when all are there."""
        begun = self._model.service.call(
            lambda at: new_weights.begin(at, path, self._last, self._model.weights_far)
        )
        coming = await asyncio.wrap_future(begun)
        await asyncio.to_thread(coming.wait)
        return coming

    def _has_read(self, reading: asyncio.Task[new_weights.Coming]) -> None:
        """Forgets a reading that has ended, whose error may have nobody to hear it."""
        self._reading = None
        if not reading.cancelled():
            reading.exception()

    async def finish(self, body: FinishBody) -> dict[str, Any]:
        """Publishes the weights that were read, under a version.

        Raises:
            ApiError: there are none, or others than the body names.
            InputError: the version does not increase; it may be sent again.
        """
        self._folder()
        if self._coming is None:
            raise errors.ApiError(
                409, f"No weights have been read; send {START} and {UPDATE} first."
            )
        path, coming = taken = self._coming
        if body.update_info is not None and path != self._path(body.update_info.path):
            raise errors.ApiError(
                409, f"Other weights have been read; send {START} and {UPDATE} again."
            )
        version = self._version(body.weight_version)

        def take(engine: Any) -> None:
            coming.publish(engine, version)
            if body.clear_cache:
                engine.clear_cache()

        await asyncio.wrap_future(self._model.service.call(take))
        if self._coming is taken:  # else another update has begun meanwhile
            self._has_started, self._coming = False, None
        logging.info("The weights are now of version %d.", version)
        return {"status": "finished", "weight_version": version}

    def _version(self, given: int | str | None) -> int:
        """Returns the version as a number.

        Raises:
            ApiError: it is none.
        """
        if given is None:
            return self._model.service.stats().version + 1
        if isinstance(given, str) and given.isdecimal():
            given = int(given[:12])
        if not isinstance(given, int) or not 0 <= given <= _MAX_VERSION:
            raise errors.bad_request(
                f"weight_version must be a number in 0..{_MAX_VERSION}, got {given!r}."
            )
        return given

    def _folder(self) -> pathlib.Path:
        """Returns the folder below which weights may lie.

        Raises:
            ApiError: there is none.
        """
        root = self._model.weights_root
        if root is None:
            raise errors.ApiError(
                403,
                "This server keeps its weights; start it with --weights_root=FOLDER to "
                "let clients replace them by those below a folder.",
            )
        return root.resolve()

    def _path(self, given: str) -> pathlib.Path:
        """Returns the place of weights.

        Raises:
            ApiError: it lies outside of the folder.
        """
        root = self._folder()
        try:
            path = (root / given).resolve()
        except (OSError, ValueError) as error:
            message = f"update_info.path cannot be used: {error}."
            raise errors.bad_request(message) from error
        if not path.is_relative_to(root):
            raise errors.ApiError(
                403, "update_info.path must lie below the server's --weights_root."
            )
        return path
