"""The flags of the commands that run as several processes. Imports no jax."""

import os
import sys
from collections.abc import Callable

from absl import flags

from glm5_jax import config as config_lib
from glm5_jax.processes import group, simulate

COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, if no cluster provides it; or JAX_COORDINATOR_ADDRESS.",
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Number of processes; or JAX_NUM_PROCESSES."
)
PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0; or JAX_PROCESS_ID."
)
JOIN_SECONDS = flags.DEFINE_integer(
    "join_seconds", 300, "Seconds that processes wait for one another at the start."
)
HEARTBEAT_SECONDS = flags.DEFINE_integer(
    "heartbeat_seconds",
    100,
    "Seconds without a sign of life after which a process counts as dead.",
    lower_bound=1,
)
SIMULATE = flags.DEFINE_integer(
    "simulate_processes", 0, "Runs as N processes on the CPU of this machine."
)


def find() -> group.Group | None:
    """Returns the group that this process belongs to; see `group.find`."""
    return group.find(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)


def are_several() -> bool:
    """Returns whether the command runs as one of several processes, or starts them."""
    return bool(SIMULATE.value or find())


def run(
    main: Callable[[], None], mesh: config_lib.MeshConfig | None, alone: bool = False
) -> int | None:
    """Runs a command alone, as one of several processes, or as a simulation of them.

    Args:
      main: the command; on processes other than the first it must print nothing.
      mesh: of all devices; None if none is asked for.
      alone: whether it cannot run as several processes.

    Returns:
      The exit code of a simulation.

    Raises:
      InputError: several processes may not be, have no mesh, or do not find each other.
    """
    me, count = find(), SIMULATE.value
    if alone and (count or me):
        raise group.not_alone()
    if (count or me) and mesh is None:
        raise config_lib.InputError(
            "several processes need a mesh of all their devices, which share the "
            "model; say for example --config.mesh.fsdp=16."
        )
    if count:
        assert mesh is not None
        return simulate.run_command(mesh, count)
    if me is None:
        return main()
    from glm5_jax.processes import together  # imports jax: after the input is checked

    # gloo greets on the standard output, which is for results.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with together.joined(
        me, JOIN_SECONDS.value, HEARTBEAT_SECONDS.value, ends_at_once=True
    ):
        main()
    return None
