"""Tells the other processes what process 0 does, and process 0 what came of it.

Messages go over the key-value store of jax.distributed, so that a process that waits
for the next one keeps no device busy.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax

# The key-value store of jax.distributed has no public name; Orbax uses it like this.
from jax._src import distributed

_PATIENCE_MS = 60_000  # of one look for the next message; there may be many


class Speaker:
    """Sends messages from process 0; one thread at a time uses it."""

    def __init__(self, name: str) -> None:
        """Sends nothing yet.

        Args:
          name: of the messages, used once in a run.
        """
        self._name = name
        self._num_said = self._num_forgotten = 0

    def say(self, message: bytes) -> None:
        """Sends a message, and does not wait for anybody to hear it."""
        client: Any = distributed.global_state.client
        client.key_value_set_bytes(_key(self._name, self._num_said), message)
        self._num_said += 1

    def forget(self) -> None:
        """Frees the memory of all messages, which all processes must have heard."""
        client: Any = distributed.global_state.client
        for number in range(self._num_forgotten, self._num_said):
            client.key_value_delete(_key(self._name, number))
        self._num_forgotten = self._num_said


def answer(name: str, message: bytes) -> None:
    """Sends process 0 what this process has to say under a name; in any thread."""
    client: Any = distributed.global_state.client
    client.key_value_set_bytes(_key(name, jax.process_index()), message)


def answers(name: str, num_processes: int) -> list[bytes]:
    """Returns every process's answer once all have come, and frees their memory."""
    client: Any = distributed.global_state.client
    found = [_waited(_key(name, number)) for number in range(num_processes)]
    for number in range(num_processes):
        client.key_value_delete(_key(name, number))
    return found


def heard(name: str) -> Iterator[bytes]:
    """Yields the messages in their order, for ever, as process 0 sends them.

    Args:
      name: of the messages.
    """
    for number in itertools.count():
        yield _waited(_key(name, number))


def _waited(key: str) -> bytes:
    """Returns the message of a key, whenever it comes."""
    client: Any = distributed.global_state.client
    while True:
        try:
            return client.blocking_key_value_get_bytes(key, _PATIENCE_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _key(name: str, number: int) -> str:
    return f"glm5_jax/calls/{name}/{number}"
