"""A corpus of any size to shards of packed rows, by several processes.

The source is cut into parts (plan.py), each of which one process reads, tokenizes,
packs and writes (part.py). A finished part has a record, so that a preparation that was
killed, or a source in which something was mended, goes on with the others; what comes
out depends neither on that nor on the number of processes. index.json, written last, is
what training looks for.
"""

import contextlib
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

_PARTS_FOR_BPE = 16  # of the source, evenly spread, that a BPE is trained on
_LOCK = ".lock"
_OWN = {part_lib.RECORDS, _LOCK}  # that a preparation killed at its beginning leaves


def prepare(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    num_workers: int = 1,
    *,
    check: bool = False,
) -> dict[str, Any]:
    """Prepares `target`, or what is missing of it.

    Args:
        config: source and settings.
        target: a new folder, or one that this has begun with the same settings.
        num_workers: processes.
        check: whether to read finished shards again and replace damaged ones.

    Returns:
        What was written, by bucket.

    Raises:
        config_lib.InputError: source, tokenizer, settings or folder cannot be used; if
            nothing of a new folder is finished, nothing of it is left.
    """
    began = time.perf_counter()
    target = target.expanduser()
    files = inputs.files_of(config)
    _require_apart(config, target)
    inputs.check_tokenizer(config)
    with _claimed(target):
        plan = plan_lib.make(config, target, files, num_workers)
        tokenizer = _tokenizer(config, target, plan.parts)
        for number in part_lib.numbers(target) - set(range(len(plan.parts))):
            part_lib.remove(config, target, number)  # of a source that was longer
        todo = _todo(target, plan.parts, tokenizer, check=check)
        logging.info("%d parts, of which %d are to do.", len(plan.parts), len(todo))
        tasks = [(config, target, p, check) for p in todo]
        with workers.bar("prepare", sum(p.num_bytes for p in todo)) as bar:
            for num_bytes in workers.results(_make, tasks, num_workers):
                bar.update(num_bytes)  # what is whole stays where one fails
        plan_lib.require_unchanged(config, plan)
        written = _write_indices(config, target, plan, tokenizer)
    seconds = round(time.perf_counter() - began, 2)
    return {"target": str(target), "seconds": seconds, **written}


def _require_apart(config: config_lib.PrepareConfig, target: pathlib.Path) -> None:
    """Checks that the next start would not read what is made as documents."""
    root = pathlib.Path(config.source).expanduser()
    is_folder = config.source != inputs.PYTHON
    if is_folder and target.absolute().is_relative_to(root.absolute()):
        raise config_lib.InputError(
            f"--target={target} lies inside --source={config.source}, and would be "
            f"read as a part of it; give a folder beside it."
        )


@contextlib.contextmanager
def _claimed(target: pathlib.Path) -> Iterator[None]:
    """Makes the folder and keeps other preparations out of it.

    Where the user's input is wrong, what is new is removed, unless a part is finished.
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
            f"cannot write into {target}: {error.strerror}; give a --target in which "
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
            path.unlink()  # half a shard, of a worker that was killed
        try:
            yield
        except config_lib.InputError:
            if is_new and not part_lib.numbers(target):
                _remove(target, missing)
            raise


def _require_own(target: pathlib.Path) -> None:
    """Checks that nothing of others is written into."""
    if any(path.name not in _OWN for path in target.iterdir()):
        raise config_lib.InputError(
            f"{target} is not empty and holds no preparation (no {index_lib.PLAN}); "
            f"give another --target, so that nothing in it is overwritten."
        )


def _remove(target: pathlib.Path, folders: Sequence[pathlib.Path]) -> None:
    """Removes what there is before the first part, and those folders if empty."""
    for name in (index_lib.PLAN, part_lib.TOKENIZER, _LOCK):
        (target / name).unlink(missing_ok=True)
    for folder in (target / part_lib.RECORDS, *folders):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            folder.rmdir()


def _tokenizer(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    parts: Sequence[part_lib.Part],
) -> tokenizer_lib.Tokenizer:
    """The tokenizer that is asked for; a BPE is trained once and kept."""
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
    """Training texts of parts that are evenly spread over the source."""
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
    """The parts that are not there as they would be made now."""
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
    """An index for each bucket that has rows to train on; returns their figures."""
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
            "No document of %s is held out, and training needs one to evaluate on: cut "
            "it into more documents or raise held_out_percent.",
            config.source,
        )
    if len(figures) == num_counts:
        for each in plan.parts:
            part_lib.remove(config, target, each.number)
        for name in part_lib.folder_names(config):
            _forget(target, name)
        raise config_lib.InputError(
            f"source {config.source!r} leaves nothing to train on: all of its "
            f"{figures['documents']} documents are held out by their names, or have "
            f"nothing to train among their first tokens. Cut it into more documents, "
            f"lower held_out_percent, or raise sequence_length."
        )
    return figures


def _forget(target: pathlib.Path, bucket: str) -> None:
    """A bucket has nothing to train on, or no more; where it is empty, it goes."""
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
    """Counts documents; warns of what training will want to know of conversations."""
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
