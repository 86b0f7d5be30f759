"""Flags that a server of several processes refuses; imports no jax."""

from glm5_jax import config
from glm5_jax.processes import flags as process_flags
from glm5_jax.serving import engine_flags, for_prefill


def require_flags() -> None:
    """Checks that several processes, if there are, can do what the flags ask for.

    Raises:
      InputError: lists the flags for servers of one process.
    """
    if not process_flags.are_several():
        return
    alone = engine_flags.HOST_PAGES, for_prefill.PREFILL_SERVERS
    found = [f"--{flag.name}" for flag in alone if flag.value]
    if found:
        raise config.InputError(
            f"{', '.join(found)} cannot be given to a server of several processes: one "
            f"process has a part of the cache alone. Leave it out, or start a server "
            f"of one process."
        )
