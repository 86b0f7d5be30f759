"""Joining jax.distributed, agreeing on small things, and ending together.

A process that fails while the others sit in a collective leaves them there for ever. So
each waits in a thread for word of a failure, over the service that jax.distributed
starts anyway, and leaves with the one that failed: same exit code, its message.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

# The key-value store of jax.distributed has no public name; Orbax uses it like this.
from jax._src import distributed
from jax.experimental import multihost_utils

from glm5_jax.config import failures
from glm5_jax.processes import group as group_lib
from glm5_jax.processes import interrupts, roll_call

JOIN_SECONDS = 300  # for all processes to come
HEARTBEAT_SECONDS = 100  # jax's own default
_PATIENCE_MS = 3_600_000  # for process 0 to say something: it may read a corpus first
_FINISH_MS = 600_000  # for all to come to the end: process 0 draws curves there
_FAREWELL_MS = 10_000  # for all to hear of a failure
_WORD, _LEAVING, _DONE = "glm5_jax/word", "glm5_jax/leaving", "glm5_jax/done"


@contextlib.contextmanager
def joined(
    group: group_lib.Group | None,
    timeout: int = JOIN_SECONDS,
    heartbeat: int = HEARTBEAT_SECONDS,
) -> Iterator[None]:
    """Inside, this process and the others of its group are one run.

    Enter it before the first use of a device. An error inside ends all processes, this
    one included, so that it never comes out; SystemExit is an end that all agreed on.
    A process that is alone ends at once on SIGTERM or ctrl-C (`interrupts`).

    Args:
      group: of this process; None where it is alone.
      timeout: seconds that processes wait for each other.
      heartbeat: seconds without a sign of life after which a process counts as dead,
        and the others end.

    Raises:
      InputError: the others do not come, or disagree on the numbers.
    """
    if group is None:
        with interrupts.ending_at_once():
            yield
        return
    address, count, number = dataclasses.astuple(group)
    is_explicit = None not in (address, count, number)
    if is_explicit:
        roll_call.hold(address, count, number, timeout)
    jax.distributed.initialize(
        address,
        count,
        number,
        # A simulation is heard on loopback alone; else on every interface.
        coordinator_bind_address=address if _is_loopback(address) else None,
        cluster_detection_method="deactivate" if is_explicit else None,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=heartbeat,
    )
    end = _End(distributed.global_state.client)
    try:
        yield
    except SystemExit:
        end.part()
        raise
    except BaseException as error:
        end.take_others_along(error)
    end.part()


def _is_loopback(address: str | None) -> bool:
    return (address or "").startswith(("127.", "localhost:", "[::1]:"))


def is_first() -> bool:
    """Tells whether this is process 0, which alone writes; alone, asks no device."""
    return not jax.distributed.is_initialized() or _number() == 0


def from_first(name: str, make: Callable[[], str]) -> str:
    """Returns what process 0 makes, on all; the others wait for it.

    Args:
      name: of the matter, once a run.
      make: called on process 0 alone.
    """
    if not jax.distributed.is_initialized():
        return make()
    client: Any = distributed.global_state.client
    key = f"glm5_jax/{name}"
    if _number() == 0:
        client.key_value_set(key, make())
    return client.blocking_key_value_get(key, _PATIENCE_MS)


def to_first(name: str, text: str) -> list[str]:
    """Returns what every process says, by number, on process 0; the others get nothing.

    Args:
      name: of the matter, once a run.
      text: what this process says.
    """
    if not jax.distributed.is_initialized():
        return [text]
    client: Any = distributed.global_state.client
    key = f"glm5_jax/{name}"
    if _number():
        client.key_value_set(f"{key}/{_number()}", text)
        return []
    keys = [f"{key}/{number}" for number in range(1, jax.process_count())]
    said = [client.blocking_key_value_get(key, _PATIENCE_MS) for key in keys]
    for key in keys:
        client.key_value_delete(key)
    return [text, *said]


def meet(name: str) -> None:
    """Returns when all have come; gloo gives a first collective 30 s to gather.

    Args:
      name: of the place, once a run.
    """
    if jax.distributed.is_initialized():
        client: Any = distributed.global_state.client
        client.wait_at_barrier(f"glm5_jax/{name}", _PATIENCE_MS)


def numbers_of_first(numbers: list[int]) -> list[int]:
    """The numbers that process 0 has, on all; all must call it."""
    if not jax.distributed.is_initialized():
        return numbers
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    if count == 0:
        return []
    padded = np.resize(np.array([*numbers, 0], np.int32), count)
    return multihost_utils.broadcast_one_to_all(padded).tolist()


def all_true(mine: bool) -> bool:
    """Returns whether it is true on all processes; all must call it."""
    if not jax.distributed.is_initialized():
        return mine
    return bool(np.all(multihost_utils.process_allgather(np.int32(mine))))


def _number() -> int:
    """Returns this process's; jax.process_index() would start the devices."""
    return distributed.global_state.process_id


class _End:
    """How a process learns of another's failure, and how it tells of its own."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._is_failing = threading.Lock()  # held by whoever ends this process
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def part(self) -> None:
        """Waits for all, which have come to a good end."""
        with contextlib.suppress(Exception):  # somebody died: so be it
            self._client.wait_at_barrier(_DONE, _FINISH_MS)
        self._say(0, "")
        # A thread that waits in C++ while Python ends takes the process down with it.
        self._listener.join()
        jax.distributed.shutdown()

    def take_others_along(self, error: BaseException) -> None:
        """Tells the others and ends this process."""
        if isinstance(error, KeyboardInterrupt):
            code, message = interrupts.EXIT_TERMINATED, "error: interrupted.\n"
        elif described := failures.describe(error):
            code, text = described
            message = "".join(f"error: {line}\n" for line in text.splitlines())
        else:
            code, message = 1, "".join(traceback.format_exception(error))
        with self._is_failing:  # or never, where another's failure was first
            sys.stderr.write(message)
            self._say(code, message)
            self._leave(code)

    def _listen(self) -> None:
        """Waits for the word that ends the run; leaves where it is a failure."""
        word = None
        while word is None:
            try:
                text = self._client.blocking_key_value_get(_WORD, _PATIENCE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):  # nothing for an hour
                    continue
                return  # the service is gone: jax ends this process
            word = json.loads(text)
        if word["code"] and self._is_failing.acquire(blocking=False):
            number, message = word["process"], word["message"]
            sys.stderr.write(f"error: process {number} ended the run:\n{message}")
            self._leave(word["code"])

    def _say(self, code: int, message: str) -> None:
        """The first word that anybody says is the one that all hear."""
        word = {"process": _number(), "code": code, "message": message}
        with contextlib.suppress(Exception):
            self._client.key_value_set(_WORD, json.dumps(word))

    def _leave(self, code: int) -> None:
        """Without clean-up, which would wait for a collective that never ends."""
        with contextlib.suppress(Exception):  # somebody is gone already
            self._client.wait_at_barrier(_LEAVING, _FAREWELL_MS)
        if _number() == 0:  # without its service the others would abort
            threading.Event().wait(1.0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
