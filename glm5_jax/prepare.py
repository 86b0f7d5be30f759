"""Tokenizes and packs a corpus of any size, for training to read from disk.

python -m glm5_jax.prepare --source=corpus --target=prepared --workers=8

Then train with --config.data.source=prepared. The source is a file, or a folder, of
JSONL, Parquet, Arrow (Hugging Face datasets), ArrayRecord or text; with
--kind=conversations it is JSONL for stage sft. If the command was killed or stopped at
a bad line, run it again to resume. docs/data.md has the details.
"""

import json

from absl import flags, logging

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.config import explanations, fields
from glm5_jax.storage import bucket, kept

_TARGET = flags.DEFINE_string("target", None, "Folder to write.", required=True)
_WORKERS = flags.DEFINE_integer("workers", 1, "Processes.", lower_bound=1)
_CHECK = flags.DEFINE_bool(
    "check", False, "Reads finished shards and makes damaged ones again."
)
_FIELDS = explanations.of(config_lib.PrepareConfig)  # by name
for _name, _hint, _default in fields.of(config_lib.PrepareConfig):
    _is_required = _name == "source"
    _more = "" if _is_required else f"; default {_default!r}"
    _help = f"{_FIELDS[_name]} ({fields.describe(_hint)}{_more})"
    flags.DEFINE_string(_name, None, _help, required=_is_required)


def main(arguments: command_line.Arguments) -> None:
    """Prepares a corpus and prints its figures."""
    del arguments
    bucket.require_path(_TARGET.value, "--target")
    given = [(name, flags.FLAGS[name].value) for name in _FIELDS]
    given = [(name, text) for name, text in given if text is not None]
    config = command_line.resolve({}, given, config_lib.PrepareConfig)
    from glm5_jax.data.preparation import prepare

    logging.set_verbosity(logging.INFO)
    with kept.in_step(_TARGET.value) as target:
        summary = prepare.prepare(config, target, _WORKERS.value, check=_CHECK.value)
    print(json.dumps(summary | {"target": _TARGET.value}, indent=2))


if __name__ == "__main__":
    command_line.run(main, takes_config=False)
