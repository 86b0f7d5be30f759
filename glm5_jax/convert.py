"""Rewrites a model as Hugging Face safetensors or as a run folder (Orbax).

python -m glm5_jax.convert --source=zai-org/GLM-5 --target=runs/glm5

The default --format is the one that the source does not have. Weights keep their dtype
unless --dtype names another. A folder in FP8 becomes a run in bfloat16; with
--dtype=float32 it becomes a run that --dtype=fp8 turns back into the same bytes. It
streams the weights: the memory is that of the largest tensor and a constant.
"""

from absl import flags

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.storage import sent

_SOURCE = flags.DEFINE_string(
    "source", None, "Run, step or Hugging Face folder.", required=True
)
_TARGET = flags.DEFINE_string("target", None, "Folder to make.", required=True)
_FORMAT = flags.DEFINE_enum("format", None, ["hf", "orbax"], "What to write.")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16", *config_lib.QUANTIZATION_SCHEMES],
    "Number type of the weights, or a scheme of quantization for hf.",
)


def main(arguments: command_line.Arguments) -> None:
    """Converts, and prints the target and its format."""
    from glm5_jax.weights import conversion, loading

    with sent.new_folder(_TARGET.value) as target:
        written = conversion.convert(
            _SOURCE.value,
            target,
            _FORMAT.value,
            loading.overrides_of(arguments),
            _DTYPE.value,
        )
    print(f"Wrote {_TARGET.value} ({written}).")


if __name__ == "__main__":
    command_line.run(main, only_model=True)
