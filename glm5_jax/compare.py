"""Compares runs: settings that differ, figures at the same step, and their curves.

python -m glm5_jax.compare runs/a runs/b
python -m glm5_jax.compare runs/a runs/b runs/c --plot=curves.png
python -m glm5_jax.compare runs/a runs/b --metric=train/loss --metric=train/grad_norm

Reads config.json, metrics.jsonl and summary.json of each folder, also while its run is
under way. Runs of different lengths are compared at the last step that all have logged;
a run that was resumed or rolled back counts each step once, as it was done last. --plot
writes a picture of whole curves; --json prints all of it as one line of JSON.
"""

import pathlib
import sys

from absl import flags

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.training.reporting.comparison import figures, runs, text

_METRIC = flags.DEFINE_multi_string(
    "metric", [], "Metric to show and to draw; repeat the flag for more of them."
)
_PLOT = flags.DEFINE_string("plot", None, "Picture to write, FILE.png.")
_JSON = flags.DEFINE_bool("json", False, "Prints one line of JSON, not tables.")


def main(arguments: command_line.Arguments) -> int:
    """Prints the comparison, and draws it."""
    path = pathlib.Path(_PLOT.value).expanduser() if _PLOT.value else None
    if path and path.suffix != ".png":
        raise config_lib.InputError(f"--plot must be a file FILE.png, got {path}.")
    found = runs.read(arguments.words)
    metrics = figures.choose(found, _METRIC.value)
    print((text.as_json if _JSON.value else text.text)(found, metrics))
    if path:
        from glm5_jax.training.reporting.comparison import picture  # matplotlib

        picture.draw(found, figures.choose_curves(found, _METRIC.value), path)
    return 0


if __name__ == "__main__":
    command_line.run(main, takes_config=False, num_words=sys.maxsize)
