"""Prepares a corpus of any size as shards of packed rows, in several processes.

The source is cut into parts (plan.py). One process reads, tokenizes, packs and writes
each part (part.py). A finished part has a record. So a preparation that was killed, or
whose source was fixed, resumes with the unfinished parts. The result depends neither on
interruptions nor on the number of processes. Training looks for index.json, which is
written last.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import conversations, templates
from glm5_jax.data.preparation import index as index_lib
from glm5_jax.data.preparation import inputs, shards, workers
from glm5_jax.data.preparation import part as part_lib
from glm5_jax.data.preparation import plan as plan_lib
from glm5_jax.storage import bucket, copies

_PARTS_FOR_BPE = 16  # a BPE trains on so many, evenly spread
_LOCK = ".lock"
_OWN = {part_lib.RECORDS, _LOCK}  # left by a preparation killed at its start


def prepare(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    num_workers: int = 1,
    *,
    check: bool = False,
) -> dict[str, Any]:
    """Prepares `target`, or the parts of it that are missing.

    Args:
        config: source and settings.
        target: a new folder, or one begun with the same settings.
        num_workers: number of processes.
        check: rereads finished shards and replaces damaged ones.

    Returns:
        Numbers of documents, and figures of each bucket's rows.

    Raises:
        config_lib.InputError: source, tokenizer, settings or folder cannot be used. A
            new folder without a finished part is removed.
    """
    began = time.perf_counter()
    target = target.expanduser()
    if bucket.is_address(config.source):
        source = str(copies.local(config.source))
        config = dataclasses.replace(config, source=source)
    files = inputs.files_of(config)
    _require_apart(config, target)
    inputs.check_tokenizer(config)
    with _claimed(target):
        plan = plan_lib.make(config, target, files, num_workers)
        tokenizer = _tokenizer(config, target, plan.parts)
        for number in part_lib.numbers(target) - set(range(len(plan.parts))):
            part_lib.remove(config, target, number)  # from a longer source
        todo = _todo(target, plan.parts, tokenizer, check=check)
        logging.info("%d parts, of which %d are to do.", len(plan.parts), len(todo))
        tasks = [(config, target, p, check) for p in todo]
        with workers.bar("prepare", sum(p.num_bytes for p in todo)) as bar:
            for num_bytes in workers.results(_make, tasks, num_workers):
                bar.update(num_bytes)  # finished parts stay if one fails
        plan_lib.require_unchanged(config, plan)
        written = _write_indices(config, target, plan, tokenizer)
    seconds = round(time.perf_counter() - began, 2)
    return {"target": str(target), "seconds": seconds, **written}


def _require_apart(config: config_lib.PrepareConfig, target: pathlib.Path) -> None:
    """Checks that the next start would not read the output as documents."""
    root = pathlib.Path(config.source).expanduser()
    is_folder = config.source != inputs.PYTHON
    if is_folder and target.absolute().is_relative_to(root.absolute()):
        raise config_lib.InputError(
            f"--target={target} lies inside --source={config.source} and would be "
            f"read as part of it; give a folder outside."
        )


@contextlib.contextmanager
def _claimed(target: pathlib.Path) -> Iterator[None]:
    """Makes the folder and locks it against other preparations.

    If the user's input is wrong, a new folder is removed unless a part is finished.
    """
    try:
        is_new = not (target / index_lib.PLAN).exists()
        missing = [path for path in (target, *target.parents) if not path.exists()]
        if is_new and target.is_dir():
            _require_own(target)
        (target / part_lib.RECORDS).mkdir(parents=True, exist_ok=True)
        lock = (target / _LOCK).open("w")
    except OSError as error:
        raise config_lib.InputError(
            f"cannot write into {target}: {error.strerror}; give a --target where "
            f"you may create files."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise config_lib.InputError(
                f"another process is preparing {target}; wait for it, or end it."
            ) from error
        for path in target.rglob(f".*-*{shards.SUFFIX}"):
            path.unlink()  # half a shard from a killed worker
        try:
            yield
        except config_lib.InputError:
            if is_new and not part_lib.numbers(target):
                _remove(target, missing)
            raise


def _require_own(target: pathlib.Path) -> None:
    """Checks that the folder is empty or holds a preparation."""
    if any(path.name not in _OWN for path in target.iterdir()):
        raise config_lib.InputError(
            f"{target} is not empty and holds no preparation (no {index_lib.PLAN}); "
            f"give another --target, so that its files are not overwritten."
        )


def _remove(target: pathlib.Path, folders: Sequence[pathlib.Path]) -> None:
    """Removes the files that precede the first part, and folders left empty."""
    for name in (index_lib.PLAN, part_lib.TOKENIZER, _LOCK):
        (target / name).unlink(missing_ok=True)
    for folder in (target / part_lib.RECORDS, *folders):
        with contextlib.suppress(OSError):  # it holds other files
            folder.rmdir()


def _tokenizer(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    parts: Sequence[part_lib.Part],
) -> tokenizer_lib.Tokenizer:
    """Returns the requested tokenizer; trains a BPE once and saves it."""
    path = target / part_lib.TOKENIZER
    if config.tokenizer not in tokenizer_lib.BPE_NAMES:
        tokenizer = tokenizer_lib.named(config.tokenizer)
    elif path.exists():
        return tokenizer_lib.load(path)
    else:
        tokenizer = tokenizer_lib.train_bpe(
            list(_sample(config, parts)),
            config.bpe_vocab_size,
            tokenizer_lib.BPE_NAMES[config.tokenizer],
        )
    tokenizer.save(path)
    return tokenizer


def _sample(
    config: config_lib.PrepareConfig, parts: Sequence[part_lib.Part]
) -> Iterator[str]:
    """Returns training texts from parts spread evenly over the source."""
    chosen = parts[:: -(-len(parts) // _PARTS_FOR_BPE)]
    limit = tokenizer_lib.MAX_TRAINING_BYTES // len(chosen)
    for each in chosen:
        size = 0
        for document in inputs.read(config, each.spans):
            if not inputs.is_held_out(config, document):
                yield document.text
                size += len(document.text)
            if size >= limit:
                break


def _todo(
    target: pathlib.Path,
    parts: Sequence[part_lib.Part],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    check: bool,
) -> list[part_lib.Part]:
    """Returns the parts that are missing or would be made differently now."""
    digest, todo = tokenizer.digest, []
    total = sum(each.num_bytes for each in parts)
    with workers.bar("check", total, is_shown=check) as bar:
        for each in parts:
            if not part_lib.is_current(target, each, digest, check=check):
                todo.append(each)
            bar.update(each.num_bytes)
    return todo


def _make(
    task: tuple[config_lib.PrepareConfig, pathlib.Path, part_lib.Part, bool],
) -> int:
    config, target, each, check = task
    part_lib.make(config, target, each, check=check)
    return each.num_bytes


def _write_indices(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    plan: plan_lib.Plan,
    tokenizer: tokenizer_lib.Tokenizer,
) -> dict[str, Any]:
    """Writes an index for each bucket with training rows; returns their figures."""
    records = [part_lib.read_record(target, p.number) for p in plan.parts]
    whole = [record for record in records if record is not None]
    assert len(whole) == len(plan.parts)
    corpus = hashlib.sha256("".join(r["source_sha256"] for r in whole).encode())
    figures = _counts(config, whole, tokenizer)
    num_counts = len(figures)
    for name in part_lib.folder_names(config):
        sides = [record["folders"].get(name, {}) for record in whole]
        train, held_out = (
            tuple(shards.Shard(**s[side]) for s in sides if side in s)
            for side in inputs.SIDES
        )
        if not train:
            _forget(target, name)
            continue
        if name != ".":
            tokenizer.save(target / name / part_lib.TOKENIZER)
        index = index_lib.Index(
            settings=plan.settings | {"bucket": name},
            corpus=corpus.hexdigest()[:16],
            tokenizer=tokenizer.digest[:16],
            eos_id=tokenizer.eos_id,
            train=train,
            held_out=held_out,
        )
        index.write(target / name)
        for side, found in zip(inputs.SIDES, (train, held_out), strict=True):
            label = os.path.normpath(f"{name}/{side}")
            figures[label] = _figures(found, config.sequence_length)
    sides = [side for record in whole for side in record["folders"].values()]
    if not any(inputs.SIDES[1] in side for side in sides):
        logging.warning(
            "No document of %s is held out, but training evaluates on held-out ones: "
            "cut it into more documents or raise held_out_percent.",
            config.source,
        )
    if len(figures) == num_counts:
        for each in plan.parts:
            part_lib.remove(config, target, each.number)
        for name in part_lib.folder_names(config):
            _forget(target, name)
        raise config_lib.InputError(
            f"source {config.source!r} has nothing to train on: each of its "
            f"{figures['documents']} documents is held out by its name, or has no "
            f"trained token within sequence_length. Cut it into more documents, "
            f"lower held_out_percent, or raise sequence_length."
        )
    return figures


def _forget(target: pathlib.Path, bucket: str) -> None:
    """Removes the index of a bucket without training rows, and its folder if empty."""
    if bucket != ".":
        for name in (index_lib.NAME, part_lib.TOKENIZER):
            (target / bucket / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (target / bucket).rmdir()


def _counts(
    config: config_lib.PrepareConfig,
    records: Sequence[dict[str, Any]],
    tokenizer: tokenizer_lib.Tokenizer,
) -> dict[str, Any]:
    """Counts documents; warns about conversations that training should know of."""
    names = ["documents", *["cut", "dropped"] * (config.kind == "conversations")]
    if config.kind == "conversations":
        conversations.warn_of_missing_thoughts(
            any(record["thoughtful"] for record in records),
            templates.make_template(config, tokenizer),
        )
    return {name: sum(record[name] for record in records) for name in names}


def _figures(found: Sequence[shards.Shard], sequence_length: int) -> dict[str, Any]:
    rows = sum(shard.rows for shard in found)
    filled = sum(shard.filled for shard in found)
    return {
        "shards": len(found),
        "rows": rows,
        "tokens": filled,
        "filled": round(filled / max(rows * sequence_length, 1), 4),
    }
