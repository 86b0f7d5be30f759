"""Lists, verifies, or prunes the checkpoints of a run, or rolls it back to one.

python -m glm5_jax.checkpoint --checkpoint=runs/NAME
python -m glm5_jax.checkpoint --checkpoint=runs/NAME --verify
python -m glm5_jax.checkpoint --checkpoint=runs/NAME --prune --keep=2 --yes
python -m glm5_jax.checkpoint --checkpoint=runs/NAME --roll_back=4000

Exits with 1 if something is damaged. Without --yes, --prune only lists what it would
delete: steps dropped by the retention rule and set-aside folders. docs/checkpoints.md.
"""

import pathlib

from absl import flags

from glm5_jax import command_line
from glm5_jax.config import checks
from glm5_jax.storage import bucket, copies, kept

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Run folder, or a step folder.", required=True
)
_VERIFY = flags.DEFINE_bool("verify", False, "Reads all files and compares hashes.")
_PRUNE = flags.DEFINE_bool("prune", False, "Lists what to delete; --yes deletes it.")
_ROLL_BACK = flags.DEFINE_integer(
    "roll_back", None, "Makes a stopped run resume from this step."
)
_LEAVE_OUT = flags.DEFINE_integer(
    "leave_out", None, "Batches to skip after it; default: up to the newest step.", 0
)
_YES = flags.DEFINE_bool("yes", False, "With --prune: deletes.")
_KEEP = flags.DEFINE_integer("keep", None, "Keeps the N newest steps.")
_KEEP_EVERY = flags.DEFINE_integer("keep_every", None, "Keeps steps divisible by N.")
_KEEP_BEST = flags.DEFINE_integer("keep_best", None, "Keeps the N best steps.")


def main(arguments: command_line.Arguments) -> int:
    """Prints a table of the steps after doing what the flags ask for."""
    _check(arguments)
    if _PRUNE.value or _ROLL_BACK.value is not None:
        with kept.in_step(_CHECKPOINT.value) as run:
            return _change(run)
    from glm5_jax.checkpoint import inspection  # imports jax: after the flags

    rows = inspection.overview(copies.local(_CHECKPOINT.value), _VERIFY.value)
    print(inspection.table(rows))
    return int(any(row.problem for row in rows))


def _change(run: pathlib.Path) -> int:
    from glm5_jax.checkpoint import inspection, rollback

    if _ROLL_BACK.value is not None:
        made, later = rollback.by_hand(run, _ROLL_BACK.value, _LEAVE_OUT.value)
        if later:
            print(f"Set aside: steps {later}; the run's next save deletes them.")
        print(f"The run resumes from step {made.step}, with batch {made.position}.")
        return 0
    folder = inspection.checkpoints_of(run)
    keep = {"newest": _KEEP.value, "every": _KEEP_EVERY.value, "best": _KEEP_BEST.value}
    rows = inspection.to_prune(folder, inspection.rule_of(folder, **keep))
    print(inspection.table(rows))
    if _YES.value:
        inspection.prune(folder, rows)
        print(f"Deleted {len(rows)} folders.")
    else:
        print(f"{len(rows)} folders can be deleted; --yes deletes them.")
    return 0


def _check(arguments: command_line.Arguments) -> None:
    has_config = bool(arguments.overrides or arguments.config)
    is_there = _PRUNE.value and bucket.is_address(_CHECKPOINT.value)
    keeps = (_KEEP.value, _KEEP_EVERY.value, _KEEP_BEST.value)
    needs_rollback = _LEAVE_OUT.value is not None and _ROLL_BACK.value is None
    needs_prune = (_YES.value or keeps != (None,) * 3) and not _PRUNE.value
    one = "give only one of --verify, --prune and --roll_back at a time."
    prune = "--yes, --keep, --keep_every and --keep_best need --prune; add it."
    checks.require(
        (not has_config, "--config has no effect here; leave it out."),
        (sum((_PRUNE.value, _VERIFY.value, _ROLL_BACK.value is not None)) < 2, one),
        (not needs_rollback, "--leave_out needs --roll_back; add it."),
        (not needs_prune, prune),
        (not is_there or _YES.value, "--prune in a bucket needs --yes; add it."),
    )


if __name__ == "__main__":
    command_line.run(main)
