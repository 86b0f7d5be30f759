"""Batches from folders made by `glm5_jax.prepare`: a single folder or a mixture."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import grain

from glm5_jax import config
from glm5_jax.config import stages as stages_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.data.preparation import index as index_lib
from glm5_jax.data.preparation import part as part_lib
from glm5_jax.data.preparation import shards
from glm5_jax.data.rows import mixture, packing
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.data.rows import schedule as schedule_lib
from glm5_jax.storage import copies

_HELD_OUT_SEED = 0  # evaluation reads the same rows in every run
_ORDER_VERSION = 1  # raise it when mixing or shuffling changes
_OF_CONVERSATIONS = ("chat_template", "enable_thinking", "clear_thinking")


def is_prepared(data: config.DataConfig) -> bool:
    """Returns whether `data` names folders of prepared rows."""
    return bool(data.mixture) or index_lib.is_prepared(data.source)


def make_pipeline(
    data: config.DataConfig, seed: int, kind: config.DocumentKind = "text"
) -> pipeline_lib.Pipeline:
    """Opens prepared folders without holding their rows in memory.

    Args:
        data: the config's data section.
        seed: decides the order of rows.
        kind: the kind of document that the stage learns from.

    Raises:
        config.InputError: a folder cannot be used, or contradicts another folder or
            `data`.
    """
    folders = sources(data)
    indices = {name: index_lib.read(folder) for name, folder in folders.items()}
    for name, index in indices.items():
        _require_fit(folders[name], index, data, kind)
    tokenizer = _tokenizer(data, list(folders.values()), list(indices.values()))
    is_chat = kind == "conversations"

    def rows(name: str, side: Sequence[shards.Shard]) -> shards.ShardRows:
        return shards.ShardRows(
            folders[name],
            side,
            eos_id=tokenizer.eos_id,
            sequence_length=data.sequence_length,
        )

    train = {name: rows(name, index.train) for name, index in indices.items()}
    held_out = {
        name: _Shuffled(rows(name, index.held_out))
        for name, index in indices.items()
        if index.held_out
    }
    if not held_out:
        raise config.InputError(
            f"no document is held out to evaluate on in "
            f"{', '.join(map(str, folders.values()))}; prepare it with a larger "
            f"held_out_percent."
        )
    return pipeline_lib.Pipeline(
        data,
        tokenizer,
        train=mixture.Mixture(train, schedule_lib.Schedule(stages(data)), seed),
        held_out=held_out,
        fingerprint=_fingerprint(data, list(indices.values()), seed),
        template=templates.make_template(data, tokenizer) if is_chat else None,
    )


def sources(data: config.DataConfig) -> dict[str, pathlib.Path]:
    """Returns folders by name: the shortest ends of their paths that differ."""
    folders = [copies.local(p) for p in data.mixture or (data.source,)]
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]).replace(" ", "_") for p in parts]
        if len(set(names)) == len(folders):
            return dict(zip(names, folders, strict=True))
    raise config.InputError(f"data.mixture names a folder twice: {data.mixture}.")


def held_out_percent(data: config.DataConfig) -> int:
    """Returns the percentage of the documents that every folder holds out.

    A document is held out if sha256(name) % 100 is below a folder's percentage, so
    what the smallest holds out is held out in all folders.

    Raises:
        config.InputError: a folder cannot be read.
    """
    indices = [index_lib.read(folder) for folder in sources(data).values()]
    return min(index.settings["held_out_percent"] for index in indices)


def stages(data: config.DataConfig) -> list[schedule_lib.Stage]:
    """Returns the weights of the sources, by the first row where they apply."""
    weights = data.mixture_weights or ((1.0,) * max(len(data.mixture), 1),)
    batches = data.batches
    firsts = [batches.rows_before(step) for step in (0, *data.mixture_steps)]
    return [schedule_lib.Stage(*stage) for stage in zip(firsts, weights, strict=True)]


class _Shuffled:
    """The rows of all shards in one shuffled order, the same in every run."""

    def __init__(self, rows: shards.ShardRows) -> None:
        self._rows = rows
        self._order = grain.MapDataset.source(range(len(rows))).shuffle(
            seed=_HELD_OUT_SEED
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> packing.Row:
        place = self._order[index] if index < len(self) else index
        assert place is not None  # only a filter would give None
        return self._rows[place]


def _require_fit(
    folder: pathlib.Path,
    index: index_lib.Index,
    data: config.DataConfig,
    kind: config.DocumentKind,
) -> None:
    """Checks a folder's kind against the stage, and its settings against the run's."""
    if index.kind != kind:
        able = [stage.name for stage in stages_lib.STAGES if stage.feed == index.kind]
        raise config.InputError(
            f"{folder} was prepared with --kind={index.kind}, which only "
            f"{'stage' if len(able) == 1 else 'stages'} {', '.join(able)} can use; "
            f"name folders prepared with --kind={kind} as data.source or "
            f"data.mixture, or change stage."
        )
    for name in ("sequence_length", *_OF_CONVERSATIONS * (kind == "conversations")):
        there, here = index.settings[name], getattr(data, name)
        if there != here:
            raise config.InputError(
                f"data.{name} must be {there}, as {folder} was prepared, got "
                f"{here}; change it, or prepare a folder with --{name}={here}."
            )


def _tokenizer(
    data: config.DataConfig,
    folders: Sequence[pathlib.Path],
    indices: Sequence[index_lib.Index],
) -> tokenizer_lib.Tokenizer:
    """Returns the tokenizer of all folders; checks that data.tokenizer names it."""
    tokenizer = tokenizer_lib.load(folders[0] / part_lib.TOKENIZER)
    for folder, index in zip(folders, indices, strict=True):
        if tokenizer.digest[:16] != index.tokenizer:
            raise config.InputError(
                f"{folder} was prepared with another tokenizer than the "
                f"{part_lib.TOKENIZER} of {folders[0]}; prepare all with that one: "
                f"--tokenizer={folders[0] / part_lib.TOKENIZER}."
            )
    if data.tokenizer not in tokenizer_lib.BPE_NAMES:
        asked = tokenizer_lib.named(data.tokenizer)
        if asked.digest != tokenizer.digest:
            raise config.InputError(
                f"{folders[0]} was prepared with another tokenizer than "
                f"data.tokenizer={data.tokenizer!r}; omit it to use the folder's."
            )
    return tokenizer


def _fingerprint(
    data: config.DataConfig, indices: Sequence[index_lib.Index], seed: int
) -> str:
    """Returns every setting that decides the batches, with its value.

    Sources are numbered, because a folder's path and name do not change the batches.
    """
    names = [f"mixture[{i}]" for i in range(len(data.mixture))] or ["source"]
    settings = {
        f"{name}.{key}": value
        for name, index in zip(names, indices, strict=True)
        for key, value in index.fingerprint.items()
    }
    stages_of = [dataclasses.astuple(stage) for stage in stages(data)]
    settings |= {
        "mixture": stages_of,
        **pipeline_lib.batch_settings(data),
        "seed": seed,
        "order_version": _ORDER_VERSION,
    }
    return " ".join(
        f"{key}={json.dumps(value, separators=(',', ':'))}"
        for key, value in settings.items()
    )
