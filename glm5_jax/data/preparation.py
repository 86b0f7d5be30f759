"""A corpus of any size to shards of packed rows, by several processes.

The source is cut into parts (plan.json), each of which one process reads, tokenizes,
packs and writes (part.py). A finished part has a record, so that a preparation that was
killed goes on with the others; what comes out depends neither on that nor on the number
of processes. index.json, written last, is what training looks for.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from multiprocessing import connection
from typing import Any

import tqdm
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.data import cache, formats, infill, part, shards, sources
from glm5_jax.data import index as index_lib
from glm5_jax.data import tokenizer as tokenizer_lib

VERSION = 1  # raise it when reading, rearranging, shuffling, packing or writing change
_MIB = 2**20
_PARTS_FOR_BPE = 16  # of the source, evenly spread, that a BPE is trained on
_LOCK = ".lock"
_OWN = {"parts", _LOCK}  # that a preparation killed at its beginning leaves


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is to be done; equal ones give equal bytes."""

    settings: dict[str, Any]
    files: list[list[Any]]  # path, size and time of each
    parts: list[part.Part]


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
        config_lib.InputError: source, tokenizer, settings or folder cannot be used.
    """
    began = time.perf_counter()
    target = target.expanduser()
    files = _source_files(config)
    _require_apart(config.source, target)
    if config.tokenizer not in tokenizer_lib.BPE_NAMES:  # one that is to be read
        tokenizer = tokenizer_lib.named(config.tokenizer)
        if config.fim_rate:
            infill.check(tokenizer)
    with _claimed(target):
        plan = _plan(config, target, files, num_workers)
        tokenizer = _tokenizer(config, target, plan.parts)
        if config.fim_rate:
            infill.check(tokenizer)
        todo = [
            p
            for p in plan.parts
            if part.read_record(target, p.number, check=check) is None
        ]
        logging.info("%d parts, of which %d are to do.", len(plan.parts), len(todo))
        _run(config, target, todo, num_workers)
        written = _write_indices(config, target, plan, tokenizer)
    seconds = round(time.perf_counter() - began, 2)
    return {"target": str(target), "seconds": seconds, **written}


def _require_apart(source: str, target: pathlib.Path) -> None:
    """What is made must not be read as documents by the next start."""
    root = pathlib.Path(source).expanduser()
    if source != part.PYTHON and target.absolute().is_relative_to(root.absolute()):
        raise config_lib.InputError(
            f"--target={target} lies inside --source={source}, and would be read as "
            f"a part of it; give a folder beside it."
        )


def _settings(config: config_lib.PrepareConfig) -> dict[str, Any]:
    """What decides on the rows, but for the content of the source."""
    settings: dict[str, Any] = {"version": VERSION, **dataclasses.asdict(config)}
    del settings["source"]
    if config.tokenizer in tokenizer_lib.BPE_NAMES:
        settings["tokenizer"] += f"_{config.bpe_vocab_size}"
    else:
        settings["tokenizer"] = tokenizer_lib.named(config.tokenizer).digest[:16]
    del settings["bpe_vocab_size"]
    return json.loads(json.dumps(settings))


def _source_files(config: config_lib.PrepareConfig) -> list[list[Any]]:
    """Path, size and time of change of every file that will be read."""
    if config.source == part.PYTHON:
        documents = sources.read_documents(config.source)
        return [[part.PYTHON, len(documents), sources.corpus_digest(documents)]]
    root = sources.folder_of(config.source)
    paths = formats.document_files(root)
    if not paths:
        kinds = ", ".join(formats.SUFFIXES)
        raise config_lib.InputError(
            f"source holds no documents: {config.source!r}. Put {kinds} files there, "
            f"or give 'python'."
        )
    stats = [(path, path.stat()) for path in paths]
    return [
        [path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns]
        for path, stat in stats
    ]


@contextlib.contextmanager
def _claimed(target: pathlib.Path) -> Iterator[None]:
    """Makes the folder and keeps other preparations out of it."""
    try:
        is_others = target.is_dir() and not (target / index_lib.PLAN).exists()
        if is_others and any(path.name not in _OWN for path in target.iterdir()):
            raise config_lib.InputError(
                f"{target} is not empty and holds no preparation (no "
                f"{index_lib.PLAN}); give another --target, so that nothing in it is "
                f"overwritten."
            )
        (target / "parts").mkdir(parents=True, exist_ok=True)
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
        yield


def _plan(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    files: list[list[Any]],
    num_workers: int,
) -> _Plan:
    """Cuts the source into parts, or takes the plan that is there."""
    path, settings = target / index_lib.PLAN, _settings(config)
    if path.exists():
        plan = _read_plan(path)
        _require_same(target, plan, settings, files)
        return plan
    parts = _parts(config, files, num_workers)
    plan = _Plan(settings, files, parts)
    cache.write_text(path, json.dumps(dataclasses.asdict(plan)))
    return plan


def _read_plan(path: pathlib.Path) -> _Plan:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        parts = [
            part.Part(p["number"], tuple(formats.Span(**s) for s in p["spans"]))
            for p in tree["parts"]
        ]
        return _Plan(tree["settings"], tree["files"], parts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise config_lib.InputError(
            f"{path} cannot be read ({error}); give another --target."
        ) from error


def _require_same(
    target: pathlib.Path, plan: _Plan, settings: dict[str, Any], files: list[list[Any]]
) -> None:
    """A preparation goes on with what it began with."""
    there = plan.settings
    changed = [
        f"{key}: {there.get(key, 'absent')} there, {settings.get(key, 'absent')} here"
        for key in sorted(there | settings)
        if there.get(key) != settings.get(key)
    ]
    names = {tuple(f) for f in plan.files} ^ {tuple(f) for f in files}
    changed += [f"{name} has changed" for name in sorted({name for name, *_ in names})]
    if changed:
        more = [f"and {len(changed) - 5} more"] * (len(changed) > 5)
        raise config_lib.InputError(
            f"{target} was begun otherwise; give another --target, or the same source "
            f"and settings. They differ in\n  " + "\n  ".join([*changed[:5], *more])
        )


def _parts(
    config: config_lib.PrepareConfig, files: list[list[Any]], num_workers: int
) -> list[part.Part]:
    """Neighbouring spans together have about shard_mib, so that a worker holds them."""
    limit = int(config.shard_mib * _MIB)
    if config.source == part.PYTHON:
        span = formats.Span(part.PYTHON, 0, files[0][1], 0, limit)
        return [part.Part(0, (span,))]
    root = sources.folder_of(config.source)
    found: list[part.Part] = []
    spans: list[formats.Span] = []
    held = 0  # bytes of the spans
    tasks = [(root, root / name, limit) for name, *_ in files]
    sizes = [size for _, size, _ in files]
    with _bar("scan", sum(sizes)) as bar:
        for cut, size in zip(_map(_cut, tasks, num_workers), sizes, strict=True):
            bar.update(size)
            for span in cut:
                if spans and held + span.num_bytes > limit:
                    found.append(part.Part(len(found), tuple(spans)))
                    spans, held = [], 0
                spans.append(span)
                held += span.num_bytes
    return [*found, part.Part(len(found), tuple(spans))]


def _cut(task: tuple[pathlib.Path, pathlib.Path, int]) -> list[formats.Span]:
    return formats.cut(*task)


def _tokenizer(
    config: config_lib.PrepareConfig, target: pathlib.Path, parts: Sequence[part.Part]
) -> tokenizer_lib.Tokenizer:
    """The tokenizer that the folder has; at first, the one that is asked for."""
    path = target / part.TOKENIZER
    if path.exists():
        return tokenizer_lib.load(path)
    if config.tokenizer in tokenizer_lib.BPE_NAMES:
        tokenizer = tokenizer_lib.train_bpe(
            list(_sample(config, parts)),
            config.bpe_vocab_size,
            tokenizer_lib.BPE_NAMES[config.tokenizer],
        )
    else:
        tokenizer = tokenizer_lib.named(config.tokenizer)
    tokenizer.save(path)
    return tokenizer


def _sample(
    config: config_lib.PrepareConfig, parts: Sequence[part.Part]
) -> Iterator[str]:
    """Training texts of parts that are evenly spread over the source."""
    chosen = parts[:: -(-len(parts) // _PARTS_FOR_BPE)]
    limit = tokenizer_lib.MAX_TRAINING_BYTES // len(chosen)
    for each in chosen:
        size = 0
        for document in part.documents(config, each.spans):
            if not sources.is_held_out(document.name, config.held_out_percent):
                yield document.text
                size += len(document.text)
            if size >= limit:
                break


def _run(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    todo: Sequence[part.Part],
    num_workers: int,
) -> None:
    """Makes parts; those that are whole stay where one fails."""
    tasks = [(config, target, p) for p in todo]
    with _bar("prepare", sum(p.num_bytes for p in todo)) as bar:
        for num_bytes in _map(_make, tasks, num_workers):
            bar.update(num_bytes)


def _make(task: tuple[config_lib.PrepareConfig, pathlib.Path, part.Part]) -> int:
    part.make(*task)
    return task[2].num_bytes


def _map(function: Callable, tasks: Sequence, num_workers: int) -> Iterator:
    """Results in the order of the tasks, from this process or from several."""
    num_workers = min(num_workers, len(tasks))
    if num_workers <= 1:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")  # threads do not survive a fork
    with futures.ProcessPoolExecutor(num_workers, context, _begin_worker) as pool:
        try:
            yield from pool.map(function, tasks)
        except futures.process.BrokenProcessPool as error:
            raise RuntimeError(
                "a worker has died; where memory ran out, give fewer --workers or a "
                "smaller --shard_mib. What is finished stays: run the command again."
            ) from error
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _begin_worker() -> None:
    """One thread for the tokenizer, and no life without the parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _bar(label: str, num_bytes: int) -> tqdm.tqdm:
    return tqdm.tqdm(
        desc=label,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
    )


def _write_indices(
    config: config_lib.PrepareConfig,
    target: pathlib.Path,
    plan: _Plan,
    tokenizer: tokenizer_lib.Tokenizer,
) -> dict[str, Any]:
    """An index for each bucket that has rows to train on; returns their figures."""
    records = [part.read_record(target, p.number) for p in plan.parts]
    whole = [record for record in records if record is not None]
    assert len(whole) == len(plan.parts)
    corpus = hashlib.sha256("".join(r["source_sha256"] for r in whole).encode())
    figures: dict[str, Any] = {"documents": sum(r["documents"] for r in whole)}
    for name in part.folder_names(config):
        sides = [record["folders"].get(name, {}) for record in whole]
        train, held_out = (
            tuple(shards.Shard(**s[side]) for s in sides if side in s)
            for side in part.SIDES
        )
        if not train:
            continue
        if name != ".":
            tokenizer.save(target / name / part.TOKENIZER)
        index = index_lib.Index(
            settings=plan.settings | {"bucket": name},
            corpus=corpus.hexdigest()[:16],
            tokenizer=tokenizer.digest[:16],
            eos_id=tokenizer.eos_id,
            train=train,
            held_out=held_out,
        )
        index.write(target / name)
        for side, found in zip(part.SIDES, (train, held_out), strict=True):
            label = os.path.normpath(f"{name}/{side}")
            figures[label] = _figures(found, config.sequence_length)
    if len(figures) == 1:
        raise config_lib.InputError(
            f"source {config.source!r} leaves no training document: all of its "
            f"{figures['documents']} are held out by their names, or empty. Cut it "
            f"into more documents, or lower held_out_percent."
        )
    return figures


def _figures(found: Sequence[shards.Shard], sequence_length: int) -> dict[str, Any]:
    rows = sum(shard.rows for shard in found)
    filled = sum(shard.filled for shard in found)
    return {
        "shards": len(found),
        "rows": rows,
        "tokens": filled,
        "filled": round(filled / max(rows * sequence_length, 1), 4),
    }
