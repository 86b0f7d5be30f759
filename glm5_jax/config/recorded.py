"""Reads the config that a run has recorded, also one of an earlier version."""

import json
from collections.abc import Mapping
from typing import Any

from glm5_jax.config import fields
from glm5_jax.config.train import TrainConfig

# Values that runs had before a field existed, if not the default.
_WITHOUT = {"optim.router_gate": "adamw"}
# Fields of earlier versions, with the values that are constants now.
_CONSTANTS = {"optim.ns_steps": 5, "rl.top_p": 1.0}


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config.json by dotted name.

    A field that an earlier version did not have gets the value that its runs had.
    """
    # An older version without a field did what the default does now.
    defaults = {path: default for path, _, default in fields.of(TrainConfig)}
    as_json = json.loads(json.dumps(defaults))
    return as_json | _CONSTANTS | _WITHOUT | dict(fields.flatten(tree))
