"""Metrics to TensorBoard and Weights & Biases, beside metrics.jsonl.

config.trackers names them. Each is an optional extra of the package. They write into
tensorboard/ and wandb/ in the folder of the run.
"""

import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.processes import together

Values = Mapping[str, float | int | None]


@runtime_checkable
class Tracker(Protocol):
    """Receives every logged step of a run."""

    def write(self, step: int, values: Values) -> None:
        """Logs a step; None stands for a number that is not finite."""
        ...

    def rewind(self, step: int) -> None:
        """Drops the steps after the one that the run rolled back to."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


def require(names: tuple[str, ...]) -> None:
    """Checks that the packages of trackers are installed.

    Raises:
      InputError: one is missing; the message says how to install it.
    """
    for name in names:
        package = _PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise config_lib.InputError(
                f"trackers names {name!r}, which needs the package {package}: pip "
                f"install 'glm5_jax[{name}]', or leave it out of trackers."
            )


def make(
    config: config_lib.TrainConfig, workdir: pathlib.Path, start_step: int
) -> list[Tracker]:
    """Opens the trackers that the config names.

    Args:
      config: of the run, which they show.
      workdir: folder of the run.
      start_step: steps done; the trackers drop later ones.

    Raises:
      InputError: wandb cannot log in.
    """
    if not together.is_first():
        return []
    return [_KINDS[name](config, workdir, start_step) for name in config.trackers]


class TensorBoard:
    """Writes event files, by tensorboardX."""

    def __init__(
        self, config: config_lib.TrainConfig, workdir: pathlib.Path, start_step: int
    ) -> None:
        """Opens a new event file."""
        self._folder = workdir / "tensorboard"
        self._open(start_step)
        text = json.dumps(command_line.to_json_dict(config), indent=2)
        self._writer.add_text("config", f"```\n{text}\n```", start_step)

    def write(self, step: int, values: Values) -> None:
        """Logs a step."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        """Starts a new event file, which revokes later steps of the earlier files."""
        self._writer.close()
        self._open(step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _open(self, step: int) -> None:
        import tensorboardX  # an extra

        # Names of event files have seconds: two files of one second would clash.
        number = len(list(self._folder.glob("*")))
        self._writer = tensorboardX.SummaryWriter(
            str(self._folder), purge_step=step + 1, filename_suffix=f".{number}"
        )


class WeightsAndBiases:
    """Writes a run of wandb; WANDB_PROJECT, WANDB_MODE and the like apply."""

    def __init__(
        self, config: config_lib.TrainConfig, workdir: pathlib.Path, start_step: int
    ) -> None:
        """Opens the run of this folder, the same one at every start."""
        del start_step  # a repeated step is one more point of the same curve
        import wandb  # an extra

        path = str(workdir.expanduser().absolute())
        try:
            self._run = wandb.init(
                dir=path,
                name=workdir.name,
                id=hashlib.sha256(path.encode()).hexdigest()[:16],
                resume="allow",
                config=command_line.to_json_dict(config),
            )
        except wandb.errors.Error as error:
            raise config_lib.InputError(
                f"trackers names 'wandb', which refuses: {error} Log in by `wandb "
                f"login`, or set WANDB_MODE=offline."
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        """Logs a step."""
        finite = {name: value for name, value in values.items() if value is not None}
        self._run.log({"step": step, **finite})

    def rewind(self, step: int) -> None:
        """Does nothing: wandb cannot drop steps."""

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
