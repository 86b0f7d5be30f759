"""The config that is planned, the flag --topology and the typed command.

For the commands aot and plan.

This file does not import jax, which the commands import after checking the input.
"""

import pathlib
import shlex
import sys
from collections.abc import Mapping

from glm5_jax import command_line
from glm5_jax import config as config_lib

_AXES = ("fsdp", "expert", "tensor", "context")


def require_topology(given: str | None) -> str:
    """Returns the value of --topology.

    Raises:
      InputError: there is none.
    """
    if given is None:
        raise config_lib.InputError(
            "--topology is missing; give the chips of a slice as they lie, e.g. "
            "--topology=v5p:8x8x8."
        )
    return given


def planned(
    arguments: command_line.Arguments, rows: Mapping[str, str | None]
) -> config_lib.TrainConfig:
    """Returns a config whose mesh, chunks and parts are 1, as the plan varies them.

    Args:
      arguments: of the command.
      rows: new values of fields of data; None: the config's.

    Raises:
      InputError: an override is of a field that the plan varies, or the config is
        wrong.
    """
    # The varied fields return to 1 first: they need not divide the asked sizes.
    varied = dict.fromkeys((f"mesh.{axis}" for axis in _AXES), "1")
    varied |= {"mesh.data": "-1", "mesh.slices": "1", "model.expert_chunks": "1"}
    varied["optim.accumulation_steps"] = "1"
    if asked := [path for path, _ in arguments.overrides if path in varied]:
        raise config_lib.InputError(
            f"the plan varies {', '.join(asked)}: leave out "
            f"{', '.join(f'--config.{path}' for path in asked)} (slices are --slices); "
            f"for the needs of one mesh use python -m glm5_jax.aot."
        )
    given = {f"data.{name}": text for name, text in rows.items() if text}
    overrides = (*arguments.overrides, *varied.items(), *given.items())
    changed = command_line.Arguments(config=arguments.config, overrides=overrides)
    return changed.train_config()


def typed() -> str:
    """Returns the command that is running, as it can be typed again."""
    name = pathlib.Path(sys.argv[0]).stem
    return f"python -m glm5_jax.{name} {shlex.join(sys.argv[1:])}"
