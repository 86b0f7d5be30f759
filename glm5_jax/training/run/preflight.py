"""The checks of --dry_run: everything that a start needs, except its devices."""

import pathlib
from collections.abc import Mapping

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager
from glm5_jax.storage import bucket, copies
from glm5_jax.training import reference, teachers
from glm5_jax.training.feeds import corpus
from glm5_jax.training.feeds import feed as feed_lib
from glm5_jax.training.reporting import suites, trackers
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import same_data
from glm5_jax.training.run import state as run_lib
from glm5_jax.weights import loading


def check(config: config_lib.TrainConfig, workdir: str | None = None) -> str:
    """Opens data, tokenizer, environment, init_from and workdir as a start would.

    It reads no weights: it compares their names and shapes with the config.

    Args:
      config: of the run.
      workdir: its folder, if one is given; nothing is written there.

    Returns:
      A line for each finding.

    Raises:
      InputError: with the message of everything that a start would refuse.
    """
    found: list[str] = []
    errors: list[str] = []
    resumes = workdir is not None and _has_checkpoint(workdir)
    try:
        trackers.require(config.trackers)
    except config_lib.InputError as error:
        errors.append(str(error))
    try:
        suites.require(config)
    except config_lib.InputError as error:
        errors.append(str(error))
    feed: feed_lib.Feed | None = None
    try:
        feed = run_lib.make_feed(config, resumes)
        found += _feed_lines(config, feed)
    except config_lib.InputError as error:
        errors.append(str(error))
    try:
        if config.init_from is not None and not resumes:
            loading.require_same_mathematics(config)
            loading.require_params(config.init_from, config.model)
            found.append(f"init_from: {config.init_from} has every parameter")
    except config_lib.InputError as error:
        errors.append(str(error))
    try:
        found += _policy_lines(config, _pinned(workdir) if resumes else None)
    except config_lib.InputError as error:
        errors.append(str(error))
    try:
        if workdir is not None and bucket.is_address(workdir):
            found.append(f"workdir: {_bucket_state(workdir)}")
        elif workdir is not None:
            folder = pathlib.Path(workdir).expanduser()
            found.append(f"workdir: {_workdir_state(config, folder, feed)}")
    except config_lib.InputError as error:
        errors.append(str(error))
    if errors:
        raise config_lib.InputError("\n".join(dict.fromkeys(errors)))
    return "\n".join(["", "Checked", *(f"  {line}" for line in found)])


def _has_checkpoint(workdir: str) -> bool:
    """Returns whether a folder, or an address of a bucket, holds a checkpoint."""
    if bucket.is_address(workdir):
        try:
            return bool(copies.sealed(bucket.Bucket(workdir).objects()))
        except config_lib.InputError:  # `_bucket_state` says it beside other errors
            return False
    return run_folder.has_checkpoint(pathlib.Path(workdir).expanduser())


def _pinned(workdir: str | None) -> Mapping[str, int]:
    """Returns the steps of other runs that the run in a folder reads, if it says so."""
    if workdir is None or bucket.is_address(workdir):
        return {}
    folder = pathlib.Path(workdir).expanduser()
    return manager.read_metadata(folder).get("pinned", {})


def _policy_lines(
    config: config_lib.TrainConfig, steps: Mapping[str, int] | None
) -> list[str]:
    """Returns lines on the other policies that the loss reads.

    Args:
      config: of the run.
      steps: that the run reads of other runs; None: it begins, and init_from has a
        line of its own.
    """
    found = []
    if config.reference and (steps is not None or config.reference != config.init_from):
        reference.require(config, steps or {})
        found.append(f"rl.reference: {config.reference} has every parameter")
    teachers.require(config, steps or {})
    return found + [f"rl.teachers: {x} has every parameter" for x in config.teachers]


def _feed_lines(config: config_lib.TrainConfig, feed: feed_lib.Feed) -> list[str]:
    """Returns lines on the feed and the size of its tokenizer."""
    size, room = feed.tokenizer.vocab_size, config.model.vocab_size
    lines = [f"tokenizer: {size:,} ids; the model has room for {room:,}"]
    if isinstance(feed, corpus.Corpus):
        steps = config.num_steps
        for name, count in feed.epochs(steps).items():
            source = name or config.data.source
            lines.append(f"data: {source}, {count:,.3f} epochs in {steps:,} steps")
    else:
        lines.append(f"environment: {config.rl.environment}")
    return lines


def _bucket_state(address: str) -> str:
    """Says what a bucket holds, without copying it."""
    steps = copies.sealed(bucket.Bucket(address).objects())
    if not steps:
        return f"{address} holds no checkpoint"
    newest = max(number for _, number in steps)
    return f"{address} holds step {newest}; the start compares the configs"


def _workdir_state(
    config: config_lib.TrainConfig, workdir: pathlib.Path, feed: feed_lib.Feed | None
) -> str:
    """Returns a line on what a start would do with the folder."""
    run_folder.require_usable(workdir, config)
    if not run_folder.has_checkpoint(workdir):
        return f"{workdir} is free"
    metadata = manager.read_metadata(workdir)
    if feed is not None:
        same_data.require_same(metadata["data"], feed.fingerprint, workdir)
    return f"{workdir} resumes from step {metadata['step']}"
