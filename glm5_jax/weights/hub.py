"""Downloads a model of the Hugging Face hub, given as organisation/model[@revision].

huggingface_hub keeps the files in its cache, $HF_HOME, and continues a download that
was interrupted. Of a model only data is fetched: safetensors, JSON and texts; no code
and no pickles.
"""

import functools
import os
import pathlib
import re
import shutil
from typing import Any

from absl import logging

from glm5_jax import config as config_lib

FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja")
_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_name(path: str | os.PathLike) -> bool:
    """Returns whether this is the name of a model, and no path of this machine.

    runs/NAME looks like one too, so where there is a folder runs/, it is a path.
    """
    text = str(path)
    here = pathlib.Path(text.partition("@")[0])
    return bool(_NAME.fullmatch(text)) and not here.parent.exists()


@functools.cache
def folder(name: str) -> pathlib.Path:
    """Returns the folder of a model's files, which are downloaded unless they are here.

    Args:
      name: as for `is_name`.

    Raises:
      InputError: huggingface_hub is missing, the hub does not answer or has no such
        model, or the disk has no room.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise config_lib.InputError(_message(name, str(error))) from error
    repository, _, revision = name.partition("@")
    cache = pathlib.Path(os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE))
    fetch: Any = functools.partial(
        huggingface_hub.snapshot_download,
        repository,
        revision=revision or None,
        allow_patterns=list(FILES),
        cache_dir=cache,
        endpoint=os.environ.get("HF_ENDPOINT"),
    )
    try:
        try:
            files = fetch(dry_run=True)
            missing = sum(file.file_size for file in files if file.will_download)
        except errors.DryRunError:
            missing = 0  # no network: the files may still be here
        _require_room(name, cache, missing)
        return pathlib.Path(fetch())
    except config_lib.InputError:
        raise
    except Exception as error:  # of HTTP, of the file system, of the hub's answer
        raise config_lib.InputError(_message(name, str(error))) from error


def _require_room(name: str, cache: pathlib.Path, num_bytes: int) -> None:
    """Checks that a download fits on the disk, and announces it.

    Raises:
      InputError: it does not.
    """
    if num_bytes == 0:
        return
    parent = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise config_lib.InputError(
            f"{name} needs {num_bytes / 1e9:,.1f} GB more in {cache}, which has "
            f"{free / 1e9:,.1f} GB left; set HF_HUB_CACHE to a folder of a larger disk."
        )
    logging.info("Downloading %s: %.1f GB to %s ...", name, num_bytes / 1e9, cache)


def _message(name: str, reason: str) -> str:
    repository, _, revision = name.partition("@")
    flag = f" --revision {revision}" if revision else ""
    reason = " ".join(reason.split()).rstrip(".")
    return (
        f"There is no folder {name}, and it could not be downloaded from the Hugging "
        f"Face hub ({reason:.300}). On a machine with a network run pip install "
        f"huggingface_hub, then hf download {repository}{flag} --local-dir "
        f"{repository}; copy the folder here and give its path."
    )
