"""Lists, verifies, or prunes the checkpoints of a run, or rolls it back to one.

python -m glm5_jax.checkpoint --checkpoint=runs/NAME
python -m glm5_jax.checkpoint --checkpoint=runs/NAME --verify
python -m glm5_jax.checkpoint --checkpoint=runs/NAME --prune --keep=2 --yes
python -m glm5_jax.checkpoint --checkpoint=runs/NAME --roll_back=4000

Exits with 1 if something is damaged. Without --yes, --prune only lists what it would
delete: steps dropped by the retention rule and set-aside folders. docs/checkpoints.md.
"""

from absl import flags

from glm5_jax import command_line
from glm5_jax import config as config_lib

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run folder, or a step folder.", required=True
)
_VERIFY = flags.DEFINE_bool("verify", False, "Reads all files and compares hashes.")
_PRUNE = flags.DEFINE_bool("prune", False, "Lists what to delete; --yes deletes it.")
_ROLL_BACK = flags.DEFINE_integer(
    "roll_back", None, "Makes a stopped run resume from this step."
)
_LEAVE_OUT = flags.DEFINE_integer(
    "leave_out",
    None,
    "Batches to skip after that step; default: all up to the newest step.",
    0,
)
_YES = flags.DEFINE_bool("yes", False, "With --prune: deletes.")
_KEEP = flags.DEFINE_integer("keep", None, "Keeps the N newest steps.")
_KEEP_EVERY = flags.DEFINE_integer("keep_every", None, "Keeps steps divisible by N.")
_KEEP_BEST = flags.DEFINE_integer("keep_best", None, "Keeps the N best steps.")


def main(arguments: command_line.Arguments) -> int:
    """Prints a table of the steps after doing what the flags ask for."""
    _check(arguments)
    from glm5_jax.checkpoint import inspection, rollback  # import jax: after the flags

    if _ROLL_BACK.value is not None:
        made, later = rollback.by_hand(
            _CHECKPOINT.value, _ROLL_BACK.value, _LEAVE_OUT.value
        )
        if later:
            print(f"Set aside: steps {later}; the run's next save deletes them.")
        print(f"The run resumes from step {made.step}, with batch {made.position}.")
        return 0
    if not _PRUNE.value:
        folders = inspection.find(_CHECKPOINT.value)
        rows = inspection.describe(folders, _VERIFY.value)
        rows += inspection.describe_set_aside(folders[0].parent)
        print(inspection.table(rows))
        return int(any(row.problem for row in rows))
    checkpoints = inspection.checkpoints_of(_CHECKPOINT.value)
    rule = inspection.rule_of(
        checkpoints,
        newest=_KEEP.value,
        every=_KEEP_EVERY.value,
        best=_KEEP_BEST.value,
    )
    rows = inspection.to_prune(checkpoints, rule)
    print(inspection.table(rows))
    if not _YES.value:
        print(f"{len(rows)} folders can be deleted; --yes deletes them.")
        return 0
    inspection.prune(checkpoints, rows)
    print(f"Deleted {len(rows)} folders.")
    return 0


def _check(arguments: command_line.Arguments) -> None:
    if arguments.config or arguments.overrides:
        raise config_lib.InputError("--config has no effect here; leave it out.")
    if sum((_PRUNE.value, _VERIFY.value, _ROLL_BACK.value is not None)) > 1:
        raise config_lib.InputError(
            "give only one of --verify, --prune and --roll_back at a time."
        )
    if _LEAVE_OUT.value is not None and _ROLL_BACK.value is None:
        raise config_lib.InputError("--leave_out needs --roll_back; add it.")
    keeps = (_KEEP.value, _KEEP_EVERY.value, _KEEP_BEST.value)
    if not _PRUNE.value and (_YES.value or keeps != (None,) * 3):
        raise config_lib.InputError(
            "--yes, --keep, --keep_every and --keep_best need --prune; add it."
        )


if __name__ == "__main__":
    command_line.run(main)
