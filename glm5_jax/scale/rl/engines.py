"""Speed of an engine: seconds of a token of each of n sequences, by rooflines.

Decoding is estimated by estimate/serving.py from a compiled step, or from shapes. An
engine reads prompts and answers of tools between its steps. In the mean it reads
`Summary.read` tokens for each that it draws, so a step of n sequences takes the time to
read n times as many longer.
"""

import dataclasses
import functools
import json
import math
import pathlib

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import slice_devices
from glm5_jax.scale.estimate import decoding, serving
from glm5_jax.scale.rl import pushes, splits, tasks

# Share of the memory that the weights of an engine take where --engine is not given: of
# GLM-5 in bfloat16 on v5p that is the engine of 64 chips that was compiled.
SHARE_OF_WEIGHTS = 0.25
TENSOR = 2  # devices that share slots where --engine_tensor is not given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine with its tasks."""

    topology: str
    devices: int
    model: config_lib.ModelConfig
    compiled: serving.Compiled  # the step that the others are estimated from
    form: serving.Format
    length: int  # tokens that a sequence takes in the cache
    slots: int  # sequences that the cache has room for
    context: int  # tokens of a sequence in the cache, in the mean
    read_seconds: float  # in which it reads what comes with a drawn token

    @functools.cached_property
    def _seconds(self) -> dict[int, float]:
        """The seconds of a step by its sequences of a device, as far as asked for."""
        return {}

    def step_seconds(self, number: int) -> float:
        """Returns the seconds in which each of `number` sequences gets a token.

        The fullest of the devices with own slots sets the time.
        """
        fullest = -(-number // self.compiled.caches)
        if fullest not in self._seconds:
            self._seconds[fullest] = self._step_seconds(fullest)
        return self._seconds[fullest] + number * self.read_seconds

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens that a full engine draws in a second."""
        return self.slots / self.step_seconds(self.slots)

    def with_memory(self, taken: float) -> "Engine":
        """Returns an engine whose devices keep other things, of `taken` bytes each."""
        room = max(self.compiled.limit - taken, 0.0)
        compiled = dataclasses.replace(self.compiled, limit=room)
        slots = _slots(self.model, compiled, self.form, self.length)
        return dataclasses.replace(self, compiled=compiled, slots=slots)

    def _step_seconds(self, number: int) -> float:
        return serving.step(
            self.model,
            self.compiled,
            self.form,
            length=self.context,
            sequences=number,
        ).seconds


def make(
    config: config_lib.TrainConfig,
    mixture: tasks.Mixture,
    chip: str,
    *,
    topology: str | None = None,
    tensor: int | None = None,
    weights: str = "bfloat16",
    report: str | None = None,
) -> Engine:
    """Estimates an engine.

    Args:
      config: of the run.
      mixture: its tasks.
      chip: such as "v5p".
      topology: of the engine; None: the smallest slice that is sold whose memory the
        weights take SHARE_OF_WEIGHTS of.
      tensor: devices that share slots; None: TENSOR, as far as it divides them.
      weights: of pushes.SCHEMES.
      report: path of the report of a compiled decoding step, which gives topology and
        mesh; None: the step is estimated from shapes.

    Raises:
      InputError: there is no such engine or report, or the weights leave no room for a
        sequence.
    """
    form = next(form for form in serving.FORMATS if form.name == weights)
    if report is not None:
        topology, compiled = _read(report, config)
    else:
        topology = topology or _smallest(config.model, chip, weights)
        splits.require_chip(chip, topology)
        tensor = tensor or math.gcd(TENSOR, mesh_lib.num_devices(topology))
        compiled = decoding.compiled(config, topology, tensor)
    summary = mixture.summary
    # Without pages a slot has the rows of a longest episode.
    length = config.data.sequence_length
    if config.rl.num_pages:
        length = math.ceil(summary.length)
    slots = _slots(config.model, compiled, form, length)
    if slots < 1:
        raise config_lib.InputError(
            f"an engine of {topology} has no room for a sequence of {length:,} tokens "
            f"beside the weights in {weights}: give --engine more chips, or "
            f"--engine_weights=FP8."
        )
    seconds = decoding.read_seconds(config, topology, summary.context)
    return Engine(
        topology=topology,
        devices=compiled.devices,
        model=config.model,
        compiled=compiled,
        form=form,
        length=length,
        slots=slots,
        context=max(math.ceil(summary.context), 1),
        read_seconds=seconds * summary.read,
    )


def _smallest(model: config_lib.ModelConfig, chip: str, weights: str) -> str:
    """Returns the smallest slice whose memory the weights take SHARE_OF_WEIGHTS of."""
    limit = slice_devices.named(splits.smallest(chip, 1)).hbm_limit_gib
    needed = pushes.whole_bytes(model, weights) / slice_devices.GIB
    return splits.smallest(chip, needed / (limit * SHARE_OF_WEIGHTS))


def _slots(
    model: config_lib.ModelConfig,
    compiled: serving.Compiled,
    form: serving.Format,
    length: int,
) -> int:
    """Returns the sequences of this length that fit; a device has whole ones."""
    tokens = serving.step(model, compiled, form, sequences=1).cache_tokens
    return tokens // compiled.caches // length * compiled.caches


def _read(path: str, config: config_lib.TrainConfig) -> tuple[str, serving.Compiled]:
    """Returns topology and figures of a decoding step that aot compiled."""
    try:
        found = json.loads(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
        compiled = serving.Compiled.of_report(found)
        topology, layers = found["topology"], found["num_hidden_layers"]
        is_plain = found.get("quantize", "stored") == "stored"
        is_plain = is_plain and found["program"] == "decode" and not found["num_drafts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise config_lib.InputError(
            f"--engine_report must be the .json of python -m glm5_jax.aot "
            f"--program=decode --out=STEM, got {path!r} ({error!r})."
        ) from error
    if not is_plain or layers != config.model.num_hidden_layers:
        raise config_lib.InputError(
            f"--engine_report must be of a decoding step of all "
            f"{config.model.num_hidden_layers} layers, without --quantize and "
            f"--num_drafts, got {path!r}."
        )
    return topology, compiled
