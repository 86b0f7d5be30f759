"""The plan of a preparation: its settings, the files of its source, and its parts.

plan.json is written first, so that a preparation can resume: with the same settings,
and with the present files of its source.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.preparation import index as index_lib
from glm5_jax.data.preparation import inputs, workers
from glm5_jax.data.preparation import part as part_lib
from glm5_jax.data.rows import infill
from glm5_jax.data.sources import formats

VERSION = 1  # raise it when reading, rearranging, shuffling, packing or writing change
_MIB = 2**20
_OF_CONVERSATIONS = ("kind", "chat_template", "enable_thinking", "clear_thinking")
_MAX_SHOWN = 5
_LINE = "\n  "
# Errors of a file that is no JSON, or not this JSON.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a preparation; equal plans give equal bytes.

    Attributes:
        settings: the settings that determine the rows, without the source.
        source: path of the source.
        files: all files, with their sizes and times.
        parts: the parts of the source.
    """

    settings: dict[str, Any]
    source: str
    files: tuple[inputs.File, ...]
    parts: tuple[part_lib.Part, ...]


def make(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    files: Sequence[inputs.File],
    num_workers: int,
) -> Plan:
    """Cuts the source into parts, or reads the existing plan.

    If files have changed since, cuts those again, and removes the indices and a BPE
    that was trained on the source.

    Raises:
        config_lib.InputError: the folder was begun with other settings, or of another
            source; a file cannot be read.
    """
    path, settings = target / index_lib.PLAN, _settings(config)
    source = config.source
    if source != inputs.PYTHON:
        source = str(pathlib.Path(source).expanduser().resolve())
    before = _read(path) if path.exists() else None
    if before is None:
        _warn_of_others(config)
    cut: dict[str, list[formats.Span]] = {}
    if before is not None:
        changed = _changed(before.files, files)
        _require_same(target, before, settings, source, changed)
        if not changed:
            plan = dataclasses.replace(before, source=source)  # it may have moved
            _write(path, plan)
            return plan
        logging.warning(
            "Of %d files of the source %d have changed since the preparation began: "
            "%s. Parts with the same documents as before are kept.",
            len(files),
            len(changed),
            _listed(changed, ", "),
        )
        cut = {name: [] for name, *_ in files if name not in changed}
        for span in (span for part in before.parts for span in part.spans):
            if span.path in cut:
                cut[span.path].append(span)
    plan = Plan(settings, source, tuple(files), _parts(config, files, cut, num_workers))
    if before is not None:
        for folder in part_lib.folder_names(config):
            (target / folder / index_lib.NAME).unlink(missing_ok=True)
        if config.tokenizer in tokenizer_lib.BPE_NAMES:
            (target / part_lib.TOKENIZER).unlink(missing_ok=True)
    _write(path, plan)
    return plan


def require_unchanged(config: config_lib.PrepareConfig, plan: Plan) -> None:
    """Checks at the end that the files of the source are still those of the plan.

    Raises:
        config_lib.InputError: some have changed.
    """
    changed = _changed(plan.files, inputs.files_of(config))
    if changed:
        raise config_lib.InputError(
            f"files of the source have changed while it was being prepared; run the "
            f"command again, which makes their parts anew:\n  "
            f"{_listed(changed, _LINE)}"
        )


def _warn_of_others(config: config_lib.PrepareConfig) -> None:
    """Warns of files of other formats, which would be skipped silently."""
    is_folder = pathlib.Path(config.source).expanduser().is_dir()
    if not is_folder or config.kind != "text":
        return
    others = formats.other_files(inputs.root_of(config))
    if others:
        logging.warning(
            "%d files of the source are of other kinds than %s and are not read: %s.",
            len(others),
            ", ".join(formats.SUFFIXES),
            _listed(others, ", "),
        )


def _settings(config: config_lib.PrepareConfig) -> dict[str, Any]:
    """Returns the settings that determine the rows."""
    settings: dict[str, Any] = {"version": VERSION, **dataclasses.asdict(config)}
    del settings["source"]
    if config.tokenizer in tokenizer_lib.BPE_NAMES:
        settings["tokenizer"] += f"_{config.bpe_vocab_size}"
    else:
        settings["tokenizer"] = tokenizer_lib.named(config.tokenizer).digest[:16]
    del settings["bpe_vocab_size"]
    settings["fim_spm_rate"] = infill.SPM_RATE
    if config.packing == "interleaved":  # plans of earlier versions lack it else
        settings["interleave_tokens"] = config_lib.INTERLEAVE_TOKENS
    if config.kind == "text":
        for name in _OF_CONVERSATIONS:
            del settings[name]
    return json.loads(json.dumps(settings))


def _write(path: pathlib.Path, plan: Plan) -> None:
    tree = json.loads(json.dumps(dataclasses.asdict(plan)))
    checksum = index_lib.checksum_of(tree)
    files.write_text(path, json.dumps({**tree, "checksum": checksum}))


def _read(path: pathlib.Path) -> Plan:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        checksum = tree.pop("checksum", None)  # an earlier version wrote none
        if checksum not in (None, index_lib.checksum_of(tree)):
            raise ValueError("its content does not match its checksum")
        if not _is_typed(tree):
            raise TypeError("a value has another type than prepare writes")
        parts = tuple(part_lib.Part.from_json(part) for part in tree["parts"])
        files = tuple(tuple(file) for file in tree["files"])
        return Plan(tree["settings"], tree["source"], files, parts)
    except (OSError, *_DAMAGE) as error:
        raise config_lib.InputError(
            f"{path} cannot be read ({error}); give another --target."
        ) from error


def _is_typed(tree: dict[str, Any]) -> bool:
    """Returns whether the values of a plan's JSON have their types."""
    parts, files = tree["parts"], [*tree["files"]]
    files += (file for part in parts for file in part["files"])
    spans = [span for part in parts for span in part["spans"]]
    names = [tree["source"], *(span["path"] for span in spans)]
    counts = ("start", "stop", "first", "num_bytes")
    numbers = [part["number"] for part in parts]
    numbers += (span[name] for span in spans for name in counts)
    of_file = ([str, int, int], [str, int, str])
    return (
        isinstance(tree["settings"], dict)
        and all(isinstance(name, str) for name in names)
        and all(type(number) is int for number in numbers)  # True is none
        and all([*map(type, file)] in of_file for file in files)
    )


def _changed(before: Sequence[inputs.File], now: Sequence[inputs.File]) -> list[str]:
    """Returns the names of files that are new, missing or changed."""
    return sorted({name for name, *_ in set(before) ^ set(now)})


def _require_same(
    target: pathlib.Path,
    before: Plan,
    settings: dict[str, Any],
    source: str,
    changed: Sequence[str],
) -> None:
    """Checks that a preparation resumes with its own settings and source."""
    there = before.settings
    differing = [
        f"{key}: {there.get(key, 'absent')} there, {settings.get(key, 'absent')} here"
        for key in sorted(there | settings)
        if there.get(key) != settings.get(key)
    ]
    if changed and before.source != source:
        differing += [f"source: {before.source} there, {source} here"]
        differing += [f"{name} has changed" for name in changed]
    if differing:
        raise config_lib.InputError(
            f"{target} was begun otherwise; give another --target, or the same source "
            f"and settings. They differ in\n  {_listed(differing, _LINE)}"
        )


def _listed(names: Sequence[str], separator: str) -> str:
    """Returns the first few names, and the number of the others."""
    more = [f"and {len(names) - _MAX_SHOWN} more"] * (len(names) > _MAX_SHOWN)
    return separator.join([*names[:_MAX_SHOWN], *more])


def _parts(
    config: config_lib.PrepareConfig,
    files: Sequence[inputs.File],
    cut: Mapping[str, list[formats.Span]],
    num_workers: int,
) -> tuple[part_lib.Part, ...]:
    """Joins neighbouring spans into parts of about shard_mib, which fit into memory.

    Args:
        config: the settings.
        files: the files of the source.
        cut: spans of the files that are already cut.
        num_workers: number of processes.
    """
    limit = int(config.shard_mib * _MIB)
    if config.source == inputs.PYTHON:
        span = formats.Span(inputs.PYTHON, 0, files[0][1], 0, limit)
        return (part_lib.Part(0, (span,), tuple(files)),)
    root, todo = inputs.root_of(config), [f for f in files if f[0] not in cut]
    tasks = [(root, root / name, limit) for name, *_ in todo]
    spans = dict(cut)
    with workers.bar("scan", sum(size for _, size, _ in todo)) as bar:
        for found, (name, size, _) in zip(
            workers.results(_cut, tasks, num_workers), todo, strict=True
        ):
            spans[name] = found
            bar.update(size)
    by_name = {file[0]: file for file in files}
    groups: list[list[formats.Span]] = [[]]
    held = 0  # bytes of the last group
    for span in (span for name, *_ in files for span in spans[name]):
        if groups[-1] and held + span.num_bytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(span)
        held += span.num_bytes
    return tuple(
        part_lib.Part(
            number=i,
            spans=tuple(group),
            files=tuple(by_name[name] for name in dict.fromkeys(s.path for s in group)),
        )
        for i, group in enumerate(groups)
    )


def _cut(task: tuple[pathlib.Path, pathlib.Path, int]) -> list[formats.Span]:
    return formats.cut(*task)
