"""What generate.py and evaluate.py do with their flags."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.inference import engine, loading, scoring


def generate(
    checkpoint: str,
    overrides: Sequence[command_line.Override],
    *,
    prompt: str | None,
    tokens: str | None,
    tokens_out: str | None,
    ignore_eos: bool,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
) -> list[str]:
    """Continues a text, or every row of ids.npy.

    A temperature or top_p of None is that of the model's generation_config.json.

    Writes prompts and continuations to `tokens_out`: as many dims as `tokens` has, one
    for a text; rows that stopped earlier are filled with pad_token_id, or 0.

    Returns:
      Each prompt with its continuation, as text, or as ids where there is no tokenizer.

    Raises:
      InputError: see `loading.load_model` and `engine.generate`.
    """
    _require_one(prompt=prompt, tokens=tokens)
    _require_folder_of(tokens_out)
    ids = None if tokens is None else read_ids(tokens)
    config, params, tokenizer = loading.load_model(checkpoint, overrides)
    if ids is not None:
        prompts = np.atleast_2d(ids).tolist()
    elif tokenizer is not None:
        prompts = [tokenizer.encode(prompt or "")]
    else:
        raise _no_tokenizer(checkpoint)
    if temperature is None or top_p is None:
        defaults = loading.sampling_defaults(checkpoint)
        temperature = defaults[0] if temperature is None else temperature
        top_p = defaults[1] if top_p is None else top_p
    ends = {*config.eos_token_id, *([tokenizer.eos_id] if tokenizer else [])}
    logging.info("Compiling and sampling ...")
    stop_ids = {i for i in ends if i < config.vocab_size}  # others are never drawn
    completions = engine.generate(
        params,
        config,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        stop_ids=() if ignore_eos else stop_ids,
        seed=seed,
    )
    rows = [[*p, *c.tokens] for p, c in zip(prompts, completions, strict=True)]
    if tokens_out is not None:
        is_single = ids is None or ids.ndim == 1
        _save_rows(tokens_out, rows, config.pad_token_id or 0, is_single)
    if tokenizer is None:
        return [" ".join(map(str, row)) for row in rows]
    return [tokenizer.decode(row) for row in rows]


def evaluate(
    checkpoint: str,
    overrides: Sequence[command_line.Override],
    *,
    tokens: str | None,
    text: str | None,
    logits_out: str | None,
) -> dict[str, Any]:
    """Scores every row of ids.npy after its first token, or a text file as in training.

    Writes the logits of every position to `logits_out`, float32 [N, T, V].

    Returns:
      What evaluate.py prints.

    Raises:
      InputError: see `loading.load_model` and `scoring.score`.
    """
    _require_one(tokens=tokens, text=text)
    _require_folder_of(logits_out)
    ids = None if tokens is None else np.atleast_2d(read_ids(tokens))
    written = None if text is None else _read_text(text)
    config, params, tokenizer = loading.load_model(checkpoint, overrides)
    if ids is not None:
        rows = scoring.rows_of_tokens(ids, config)
    elif tokenizer is not None:
        length = loading.context_length(checkpoint, config)
        rows = scoring.rows_of_text(written or "", tokenizer, length)
    else:
        raise _no_tokenizer(checkpoint)
    logits = None
    if logits_out is not None:
        shape = (*rows["tokens"].shape, config.vocab_size)
        logits = np.lib.format.open_memmap(logits_out, "w+", np.float32, shape)
    logging.info("Compiling and scoring ...")
    nll = scoring.score(params, config, rows, logits)
    return scoring.summarize(rows, nll)


def _save_rows(path: str, rows: list[list[int]], padding: int, is_single: bool) -> None:
    """Writes rows of ids, filled to one length; a single one as it is."""
    length = max(map(len, rows))
    padded = [row + [padding] * (length - len(row)) for row in rows]
    out = np.asarray(padded[0] if is_single else padded, np.int32)
    with open(path, "wb") as file:  # np.save would append .npy to a name
        np.save(file, out)


def read_ids(path: str) -> Int[np.ndarray, "*N T"]:
    """Token ids of an .npy file, [T] or [N, T].

    Raises:
      InputError: it cannot be read, or holds something else.
    """
    try:
        # Mapped: a header that promises more than the file has takes no memory.
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise config_lib.InputError(
            f"Token ids cannot be read from {path}: {error}. Write integers with "
            f"numpy.save."
        ) from error
    is_array = isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.integer)
    if not (is_array and ids.ndim in (1, 2) and ids.size):
        shown = f"{ids.dtype}{list(ids.shape)}" if hasattr(ids, "shape") else "an .npz"
        raise config_lib.InputError(
            f"{path} must hold integers of shape [T] or [N, T], got {shown}."
        )
    return np.array(ids)


def _read_text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise config_lib.InputError(f"{path} cannot be read: {error}.") from error


def _require_one(**given: str | None) -> None:
    """Checks that one of two flags has a value."""
    values = [name for name, value in given.items() if value is not None]
    if len(values) != 1:
        names = " or ".join(f"--{name}" for name in given)
        found = " and ".join(f"--{name}" for name in values) or "neither"
        raise config_lib.InputError(f"Give either {names}, got {found}.")


def _require_folder_of(path: str | None) -> None:
    """Checks before the work that its result can be written."""
    if path is None:
        return
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise config_lib.InputError(f"{path} lies in a folder that does not exist.")
    if pathlib.Path(path).is_dir():
        raise config_lib.InputError(f"{path} is a folder; give the name of a file.")


def _no_tokenizer(checkpoint: str) -> config_lib.InputError:
    return config_lib.InputError(
        f"{checkpoint} has no tokenizer.json, so text cannot be read; put one there, "
        f"or give --tokens=ids.npy."
    )
