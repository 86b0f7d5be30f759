"""Writes a model with quantized weights as a Hugging Face folder.

python -m glm5_jax.quantize --checkpoint=runs/NAME --target=out/NAME-w4a8 --scheme=w4a8
    --data=README.md --calibration=auto

It reads, rounds and writes some rows of a matrix at a time. fp8 makes the format of the
FP8 releases, the other schemes that of compressed-tensors. With --data it scores a text
before and after; --calibration=auto chooses by the score how to rewrite weights before,
by smoothing or rotation, which change no result. It prints a JSON line, which is also
in the folder as quantization.json.
"""

import json

from absl import flags, logging

from glm5_jax import command_line, compile_cache
from glm5_jax import config as config_lib
from glm5_jax.storage import sent

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run, step or Hugging Face folder.", required=True
)
_TARGET = flags.DEFINE_string("target", None, "Folder to make.", required=True)
_SCHEME = flags.DEFINE_enum(
    "scheme", None, config_lib.QUANTIZATION_SCHEMES, "What to round to.", required=True
)
_DATA = flags.DEFINE_string("data", None, "Text file to score before and after.")
_CALIBRATION = flags.DEFINE_enum(
    "calibration",
    "none",
    ["auto", *config_lib.CALIBRATIONS],
    "How to rewrite the weights before; auto measures on --data.",
)
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Converts, measures, and prints what came of it."""
    from glm5_jax.inference import quantizing
    from glm5_jax.weights import loading

    logging.set_verbosity(logging.INFO)  # on stderr
    compile_cache.enable()
    overrides = loading.overrides_of(arguments)
    options = quantizing.Options(
        scheme=_SCHEME.value, data=_DATA.value, calibration=_CALIBRATION.value
    )
    with sent.new_folder(_TARGET.value) as target:
        report = quantizing.quantize(_CHECKPOINT.value, str(target), options, overrides)
    print(json.dumps(report))


if __name__ == "__main__":
    command_line.run(main, only_model=True)
