"""Joins processes with jax.distributed, lets them agree, and ends them together.

A process that fails while the others wait in a collective would leave them there for
ever. So each listens in a thread for another's failure, over the service that
jax.distributed starts anyway, and ends with the same message and exit code.
"""

import contextlib
import dataclasses
import hashlib
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

from glm5_jax import config as config_lib
from glm5_jax.config import failures
from glm5_jax.processes import group as group_lib
from glm5_jax.processes import interrupts, roll_call

JOIN_SECONDS = 300  # time for all processes to start
HEARTBEAT_SECONDS = 100  # jax's own default
_PATIENCE_MS = 3_600_000  # time for a value of process 0, which may read a corpus first
_FINISH_MS = 600_000  # time for all to finish: process 0 draws curves at the end
_FAREWELL_MS = 10_000  # time for all to learn of a failure
_WORD, _LEAVING, _DONE = "glm5_jax/word", "glm5_jax/leaving", "glm5_jax/done"
_end: "_End | None" = None  # of this process, while it is one of several


@contextlib.contextmanager
def joined(
    group: group_lib.Group | None,
    timeout: int = JOIN_SECONDS,
    heartbeat: int = HEARTBEAT_SECONDS,
    ends_at_once: bool = False,
) -> Iterator[None]:
    """Joins the processes of a group to one run until the block ends.

    Enter it before the first use of a device. An error inside ends all processes, this
    one included, and is never raised to the caller; SystemExit is an end on which all
    agreed. A process that is alone ends at once on SIGTERM or ctrl-C (`interrupts`).

    Args:
      group: the processes of the run; None if this one is alone.
      timeout: seconds that processes wait for each other.
      heartbeat: seconds without a sign of life after which a process counts as dead and
        the others end.
      ends_at_once: whether SIGTERM or ctrl-C, to any process, ends all at once.

    Raises:
      InputError: other processes are missing, or disagree on the numbers.
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
        # A simulation listens on loopback only, a real run on every interface.
        coordinator_bind_address=address if _is_loopback(address) else None,
        cluster_detection_method="deactivate" if is_explicit else None,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=heartbeat,
    )
    global _end
    end = _end = _End(distributed.global_state.client)
    try:
        with contextlib.ExitStack() as stack:
            if ends_at_once:
                stack.enter_context(interrupts.ending_at_once())
                stack.enter_context(interrupts.undoing(end.interrupt_others))
            yield
    except SystemExit:
        end.part()
        raise
    except BaseException as error:
        end.take_others_along(error)
    end.part()


def end_all(error: BaseException) -> None:
    """Ends all processes with a message, from any thread; returns if there is one."""
    if _end is not None:
        _end.take_others_along(error)


def _is_loopback(address: str | None) -> bool:
    return (address or "").startswith(("127.", "localhost:", "[::1]:"))


def is_first() -> bool:
    """Returns whether this is process 0, which alone writes; starts no device."""
    return not jax.distributed.is_initialized() or _number() == 0


def from_first(name: str, make: Callable[[], str]) -> str:
    """Returns the text that process 0 makes, on all processes; the others wait.

    Args:
      name: a name that is used once in a run.
      make: makes the text, on process 0 only.
    """
    return from_one(name, 0, make)


def from_one(name: str, number: int, make: Callable[[], str]) -> str:
    """Returns the text that one process makes, on all processes; the others wait.

    Args:
      name: a name that is used once in a run.
      number: of the process.
      make: makes the text, on that process only.
    """
    if not jax.distributed.is_initialized():
        return make()
    client: Any = distributed.global_state.client
    key = f"glm5_jax/{name}"
    if _number() == number:
        client.key_value_set(key, make())
    while True:
        try:
            return client.blocking_key_value_get(key, _PATIENCE_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):  # that process still works on it
                raise


def to_first(name: str, text: str) -> list[str]:
    """Returns the texts of all processes on process 0, and nothing on the others.

    Args:
      name: a name that is used once in a run.
      text: the text of this process.
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
    """Returns when all processes have called it: gloo's first collective waits 30 s.

    Args:
      name: a name that is used once in a run.
    """
    if jax.distributed.is_initialized():
        client: Any = distributed.global_state.client
        client.wait_at_barrier(f"glm5_jax/{name}", _PATIENCE_MS)


def numbers_of_first(numbers: list[int]) -> list[int]:
    """Returns the numbers of process 0 on all processes; all must call it."""
    if not jax.distributed.is_initialized():
        return numbers
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    if count == 0:
        return []
    padded = np.resize(np.array([*numbers, 0], np.int32), count)
    return multihost_utils.broadcast_one_to_all(padded).tolist()


def gathered(mine: np.ndarray) -> np.ndarray:
    """Stacks arrays of one shape, one of each process; all must call it."""
    if not jax.distributed.is_initialized():
        return mine[None]
    return multihost_utils.process_allgather(mine)


def whole(array: jax.Array) -> np.ndarray:
    """Returns all of an array that devices share; all processes must call it."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def all_true(mine: bool) -> bool:
    """Returns whether a condition is true on all processes; all must call it."""
    if not jax.distributed.is_initialized():
        return mine
    return bool(np.all(gathered(np.array(mine, np.int32))))


def require_same(what: str, text: str) -> None:
    """Checks that all processes were given the same; all must call it.

    Args:
      what: names it in messages.
      text: that must be equal.

    Raises:
      InputError: this process has another one than process 0.
    """
    digest = hashlib.sha256(text.encode()).digest()
    numbers = np.frombuffer(digest, np.int32).tolist()
    if numbers_of_first(numbers) != numbers:
        raise config_lib.InputError(
            f"process {_number()} has other {what} than process 0; start the same "
            f"command, with the same files, as every process."
        )


def _number() -> int:
    """Returns this process's number; jax.process_index() would start the devices."""
    return distributed.global_state.process_id


class _End:
    """Tells the other processes of a failure of this one, and learns of theirs."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._is_failing = threading.Lock()  # held by the thread that ends the process
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def part(self) -> None:
        """Waits until all processes have finished without a failure."""
        with contextlib.suppress(Exception):  # another process has died
            self._client.wait_at_barrier(_DONE, _FINISH_MS)
        self._say(0, "")
        # A thread that still waits in C++ when Python ends would crash the process.
        self._listener.join()
        jax.distributed.shutdown()

    def take_others_along(self, error: BaseException) -> None:
        """Ends the other processes and this one."""
        if isinstance(error, KeyboardInterrupt):
            code, message = interrupts.EXIT_TERMINATED, "error: interrupted.\n"
        elif described := failures.describe(error):
            code, text = described
            message = "".join(f"error: {line}\n" for line in text.splitlines())
        else:
            code, message = 1, "".join(traceback.format_exception(error))
        with self._is_failing:  # blocks for ever if another's failure was first
            sys.stderr.write(message)
            self._say(code, message)
            self._leave(code)

    def interrupt_others(self) -> None:
        """Ends the other processes, before this one ends on a signal."""
        with self._is_failing:
            self._say(interrupts.EXIT_TERMINATED, "error: interrupted.\n")
            self._wait_for_others()

    def _listen(self) -> None:
        """Waits for the message that ends the run; on a failure, ends this process."""
        word = None
        while word is None:
            try:
                text = self._client.blocking_key_value_get(_WORD, _PATIENCE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):  # no message for an hour
                    continue
                return  # the service is gone: jax ends this process
            word = json.loads(text)
        if word["code"] and self._is_failing.acquire(blocking=False):
            number, message = word["process"], word["message"]
            sys.stderr.write(f"error: process {number} ended the run:\n{message}")
            self._leave(word["code"])

    def _say(self, code: int, message: str) -> None:
        """Sends the message that ends the run; only the first one counts."""
        word = {"process": _number(), "code": code, "message": message}
        with contextlib.suppress(Exception):
            self._client.key_value_set(_WORD, json.dumps(word))

    def _leave(self, code: int) -> None:
        """Ends without clean-up, which would wait for a collective that never ends."""
        self._wait_for_others()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _wait_for_others(self) -> None:
        """Waits until the others have the message, or have ended."""
        with contextlib.suppress(Exception):  # another process has ended already
            self._client.wait_at_barrier(_LEAVING, _FAREWELL_MS)
        if _number() == 0:  # without its service the others would abort
            threading.Event().wait(1.0)
