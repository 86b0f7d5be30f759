"""Compiles a program for TPUs that this machine lacks: its memory, time and traffic.

python -m glm5_jax.aot --config=configs/glm5_pretrain.py --topology=v5p:8x8x8 \
    --out=reports/glm5_v5p_512

Prints one JSON line; --out=STEM also writes STEM.json and the report STEM.md. Nothing
runs: times are rooflines. Needs libtpu: pip install 'glm5_jax[aot]'. The exit code is 2
if the program does not fit; the message names the largest arrays and what to change.
--quantize and --num_drafts are of the engine's programs, as in `serve`.

--arrays compiles nothing and needs no libtpu: it lists every array by name, with dims,
shape, spec and bytes per device, and sums by kind.
"""

import json
import os
import sys
from typing import Any

from absl import flags

from glm5_jax import command_line, quantize_flag
from glm5_jax import config as config_lib
from glm5_jax.scale import command

_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Chips of a slice and their arrangement, e.g. v5p:8x8x8."
)
_SLICES = flags.DEFINE_integer("slices", None, "Slices; default: mesh.slices.")
_PROGRAM = flags.DEFINE_string(
    "program",
    "train",
    "train (any stage); init, restore or save (its state); push (its weights to "
    "servers); prefill, extend or decode.",
)
_NUM_DRAFTS = flags.DEFINE_integer(
    "num_drafts",
    0,
    "Tokens that multi-token prediction drafts in a round of --program=decode.",
    lower_bound=0,
)
_DEPTH = flags.DEFINE_integer(
    "depth", None, "Number of layers, for a quick look; default: the model's."
)
_ARRAYS = flags.DEFINE_bool("arrays", False, "List all arrays; compile nothing.")
_OUT = flags.DEFINE_string("out", None, "Path of the report, without suffix.")
flags.adopt_module_key_flags(quantize_flag)


def main(arguments: command_line.Arguments) -> int:
    """Compiles, prints and writes the report."""
    topology = command.require_topology(_TOPOLOGY.value)
    config = arguments.train_config()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the chips are those of --topology
    # These import jax, after the input is checked.
    from glm5_jax.scale import programs
    from glm5_jax.scale.compiled import arrays, report

    serving = programs.Serving(quantize_flag.SCHEME.value, _NUM_DRAFTS.value)
    of_what = config, str(arguments.config), topology
    how: dict[str, Any] = {"program": _PROGRAM.value, "num_slices": _SLICES.value}
    how |= {"serving": serving, "depth": _DEPTH.value, "command": command.typed()}
    if _ARRAYS.value:
        listing = arrays.make(*of_what, **how)
        print(listing.text())
        if _OUT.value:
            listing.write(_OUT.value)
        return 0
    result = report.make(*of_what, **how)
    print(json.dumps(result.line))
    if _OUT.value:
        result.write(_OUT.value)
    if not result.line["fits"]:
        raise config_lib.InputError(result.refusal)
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
