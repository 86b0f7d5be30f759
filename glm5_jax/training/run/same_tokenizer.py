"""Keeps the tokenizer.json of a run the file that the run began with."""

import pathlib

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.processes import together
from glm5_jax.weights import companions


def keep(
    workdir: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer, wanted: str = ""
) -> str:
    """Returns the SHA-256 of the run's tokenizer.json; repairs the file if needed.

    Evaluations and exports of the run read that file. A damaged one is written again if
    the feed's tokenizer is the same; one that came with init_from cannot be.

    Args:
      workdir: folder of the run.
      tokenizer: of the feed.
      wanted: SHA-256 that the checkpoint holds; "": any.

    Raises:
      DamagedError: the file is another, and cannot be written again.
    """

    def repaired() -> str:
        path = workdir / companions.TOKENIZER
        found = tokenizer_lib.digest_of(path) if path.exists() else ""
        if not wanted or found == wanted:
            return found
        if tokenizer.digest != wanted:
            raise config_lib.DamagedError(
                f"{path} is not the file that the run began with, whose SHA-256 is "
                f"{wanted}; copy it there from init_from or data.tokenizer."
            )
        tokenizer.save(path)
        logging.error("%s WAS DAMAGED and is written again.", path)
        return wanted

    return together.from_first("tokenizer.json", repaired)
