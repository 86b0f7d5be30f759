"""The bounds of a box."""

import dataclasses

from glm5_jax.config import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a box and of the commands in it."""

    seconds: float = 30.0  # of a command; then all of the box's processes end
    memory_bytes: int = 4 * 2**30  # address space of each process
    # Memory of all processes together, looked at every second: beyond it they end.
    resident_bytes: float = 4.0 * 2**30
    num_processes: int = 128  # at a time, the box's own three among them; in a sandbox
    # Of all files in the box, also those in /tmp and /dev/shm; of one file without a
    # sandbox.
    disk_bytes: int = 256 * 2**20
    output_bytes: int = 64 * 2**10  # kept of each of a command's two streams

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            config.InputError: one is not positive.
        """
        checks.require(
            *(
                (value > 0, f"sandbox.Limits.{name} must be positive, got {value}.")
                for name, value in vars(self).items()
            )
        )
