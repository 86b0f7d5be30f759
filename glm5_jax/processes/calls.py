"""Tells the other processes of a run, message by message, what process 0 does.

Messages go over the key-value store of jax.distributed, so that a process that waits
for the next one keeps no device busy.
"""

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


def heard(name: str) -> Iterator[bytes]:
    """Yields the messages in their order, for ever, as process 0 sends them.

    Args:
      name: of the messages.
    """
    client: Any = distributed.global_state.client
    number = 0
    while True:
        try:
            message = client.blocking_key_value_get_bytes(
                _key(name, number), _PATIENCE_MS
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            continue
        yield message
        number += 1


def _key(name: str, number: int) -> str:
    return f"glm5_jax/calls/{name}/{number}"
