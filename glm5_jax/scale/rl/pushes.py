"""Bytes and seconds of a push: a version of the weights on its way to the engines.

    seconds = max(engines * bytes / (chips that train * network),
                  bytes / (chips of an engine * network))

The trainer sends a copy to every engine, through the network of all of its chips, and
every engine receives one through its own. Encoding, hashing and copies between a host
and its chips come on top.
"""

import dataclasses
import functools

import jax

from glm5_jax import config as config_lib
from glm5_jax.inference import weights as engine_weights
from glm5_jax.model import transformer
from glm5_jax.quantization import schemes
from glm5_jax.scale import slice_devices
from glm5_jax.scale.rl import splits

# Schemes of quantization by the names of serving.FORMATS.
SCHEMES = {"bfloat16": None, "FP8": "fp8"}
KINDS = ("full", "delta")
# Shares of the bytes that a difference takes after a step at a learning rate of 1e-6,
# as rl/weight_store/coding.py writes it: of a model of 89M parameters, and of a matrix
# N(0, 0.02) whose values move by the rate (docs/log.md).
DELTA_SHARES = {"bfloat16": 0.069, "FP8": 0.02}


@dataclasses.dataclass(frozen=True)
class Push:
    """A version of the weights."""

    weights: str
    kind: str
    num_bytes: float

    def seconds(self, split: splits.Split, device: slice_devices.Device) -> float:
        """Returns the least time until all engines have it."""
        sent = split.num_engines * self.num_bytes / (split.training * device.dcn)
        received = self.num_bytes / (split.engine * device.dcn)
        return max(sent, received)


def of(model: config_lib.ModelConfig, weights: str, kind: str) -> Push:
    """Returns a push of a model.

    Args:
      model: all of its parameters are sent, MTP's among them.
      weights: of SCHEMES.
      kind: of KINDS.
    """
    share = DELTA_SHARES[weights] if kind == "delta" else 1.0
    return Push(weights, kind, whole_bytes(model, weights) * share)


def whole_bytes(model: config_lib.ModelConfig, weights: str) -> int:
    """Returns the bytes of all parameters as a step computes with them, or in FP8."""
    params, scheme = transformer.abstract_params(model), SCHEMES[weights]
    if scheme is not None:
        dims = transformer.param_dims(model)
        params = schemes.abstract(params, dims, schemes.SCHEMES[scheme])
    cast = functools.partial(engine_weights.cast_params, config=model)
    leaves = jax.tree.leaves(jax.eval_shape(cast, params))
    return sum(x.size * x.dtype.itemsize for x in leaves)
