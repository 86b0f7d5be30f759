"""Episodes as JSON, to send them between processes and to keep them.

A record has everything that training reads, and what another reward needs: the task
with its answer, and the transcript. So rewards can be computed again without sampling.
"""

import base64
import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from glm5_jax.environments import protocol
from glm5_jax.inference import requests
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import gateway

FORMAT = 1  # of a record; a reader refuses others
_COUNTS = (
    *("group", "num_turns", "num_forks", "num_drift_tokens", "num_truncated"),
    *("reason", "close_error"),
)
_DAMAGE = (KeyError, TypeError, ValueError, zlib.error, gateway.MisalignedError)


@dataclasses.dataclass(frozen=True)
class Unkept:
    """Stands for a task's answer that is no JSON, with which nothing can be scored."""

    text: str  # its repr


class FormatError(ValueError):
    """Raised if a record is not one of this format."""


def to_json(episode: episodes_lib.Episode) -> dict[str, Any]:
    """Returns a record, which long_json.py can write.

    An answer that is no JSON is written as its repr, so that such a task cannot be
    scored again.
    """
    reward, answer = episode.reward, episode.task.answer
    is_kept = _is_json(answer)
    if not is_kept:
        answer = answer.text if isinstance(answer, Unkept) else repr(answer)
    task = dataclasses.asdict(dataclasses.replace(episode.task, answer=answer))
    return {
        "format": FORMAT,
        "task": task,
        "answer_is_kept": is_kept,
        "samples": [_sample_to_json(sample) for sample in episode.samples],
        "reward": None if reward is None else dataclasses.asdict(reward),
        "label": episode.label.value,
        "transcript": episode.transcript,
        **{name: getattr(episode, name) for name in _COUNTS},
    }


def from_json(record: Mapping[str, Any]) -> episodes_lib.Episode:
    """Returns the episode of a record.

    Raises:
      FormatError: the record is damaged, or of another format.
    """
    if record.get("format") != FORMAT:
        raise FormatError(
            f"a trajectory must have format {FORMAT}, got {record.get('format')!r}; "
            f"read it with the version of glm5_jax that wrote it."
        )
    try:
        task = dict(record["task"])
        for name in ("messages", "tools"):
            task[name] = tuple(task[name])
        if not record.get("answer_is_kept", True):
            task["answer"] = Unkept(task["answer"])
        reward = record["reward"]
        return episodes_lib.Episode(
            task=protocol.Task(**task),
            samples=[_sample_from_json(sample) for sample in record["samples"]],
            reward=None if reward is None else protocol.Reward(**reward),
            label=protocol.Label(record["label"]),
            transcript=list(record["transcript"]),
            **{name: record[name] for name in _COUNTS},
        )
    except _DAMAGE as error:
        raise FormatError(f"a trajectory is damaged: {error!r}") from error


def _is_json(x: Any) -> bool:
    """Returns whether a value comes back from JSON, tuples as lists."""
    if isinstance(x, Mapping):
        return all(isinstance(k, str) and _is_json(v) for k, v in x.items())
    if isinstance(x, list | tuple):
        return all(map(_is_json, x))
    return x is None or isinstance(x, str | int | float)


def all_to_json(
    episodes: Iterable[episodes_lib.Episode],
) -> list[dict[str, Any]]:
    """Returns the records of episodes."""
    return [to_json(episode) for episode in episodes]


def all_from_json(
    records: Iterable[Mapping[str, Any]],
) -> list[episodes_lib.Episode]:
    """Returns the episodes of records.

    Raises:
      FormatError: one is damaged, or of another format.
    """
    return [from_json(record) for record in records]


def pack(lists: Sequence[Sequence[episodes_lib.Episode]]) -> dict[str, Any]:
    """Returns lists as JSON, in which an episode that stands in several is once."""
    places: dict[int, int] = {}  # by identity
    records = []
    for episode in itertools.chain.from_iterable(lists):
        if id(episode) not in places:
            places[id(episode)] = len(records)
            records.append(to_json(episode))
    return {
        "records": records,
        "lists": [[places[id(episode)] for episode in some] for some in lists],
    }


def unpack(packed: Mapping[str, Any]) -> list[list[episodes_lib.Episode]]:
    """Returns the lists of `pack`.

    Raises:
      FormatError: a record is damaged, or of another format.
    """
    episodes = all_from_json(packed["records"])
    return [[episodes[place] for place in some] for some in packed["lists"]]


def completion_to_json(
    completion: requests.Completion, before: np.ndarray | None = None
) -> dict[str, Any]:
    """Returns a record of a turn.

    Args:
      completion: the turn, with the experts of all the text before it.
      before: experts of an earlier turn; the record does not repeat its first rows as
        far as they are the same.
    """
    record: dict[str, Any] = {**vars(completion)}
    if (experts := completion.experts) is not None:
        record["same_experts"] = _num_same(before, experts)
        experts = experts[record["same_experts"] :]
    record["experts"] = _packed(experts)
    return record


def completion_from_json(
    record: Mapping[str, Any], before: np.ndarray | None = None
) -> requests.Completion:
    """Returns the turn of a record.

    Args:
      record: of `completion_to_json`.
      before: which it was given.

    Raises:
      FormatError: the record is damaged, or of another format.
    """
    try:
        fields: dict[str, Any] = {**record, "experts": _unpacked(record["experts"])}
        if num_same := fields.pop("same_experts", 0):
            if before is None or len(before) < num_same:
                raise ValueError(f"its first {num_same} experts are of another turn")
            experts = before[:num_same], fields["experts"]
            fields["experts"] = np.concatenate(experts)
        some = fields["alternatives"]
        fields["alternatives"] = [[(i, x) for i, x in pairs] for pairs in some]
        return requests.Completion(**fields)
    except _DAMAGE as error:
        raise FormatError(f"a turn is damaged: {error!r}") from error


def _sample_to_json(sample: gateway.Sample) -> dict[str, Any]:
    record: dict[str, Any] = {**vars(sample)}
    record["mask"] = [int(is_sampled) for is_sampled in sample.mask]
    record["experts"] = _packed(sample.experts)
    return record


def _sample_from_json(record: Mapping[str, Any]) -> gateway.Sample:
    fields: dict[str, Any] = {**record, "experts": _unpacked(record["experts"])}
    fields["mask"] = [bool(is_sampled) for is_sampled in fields["mask"]]
    return gateway.Sample(**fields).check()


def _num_same(before: np.ndarray | None, experts: np.ndarray) -> int:
    """Returns how many of the first rows are the same."""
    if before is None or before.shape[1:] != experts.shape[1:]:
        return 0
    size = min(len(before), len(experts))
    differ = np.any(before[:size] != experts[:size], axis=(1, 2))
    return int(np.argmax(differ)) if differ.any() else size


def _packed(experts: np.ndarray | None) -> dict[str, Any] | None:
    """Returns the experts of tokens as JSON, compressed."""
    if experts is None:
        return None
    data = zlib.compress(np.ascontiguousarray(experts, "<u2").tobytes(), 1)
    return {"shape": [*experts.shape], "data": base64.b64encode(data).decode()}


def _unpacked(record: Mapping[str, Any] | None) -> np.ndarray | None:
    if record is None:
        return None
    data = zlib.decompress(base64.b64decode(record["data"]))
    return np.frombuffer(data, "<u2").reshape(record["shape"]).astype(np.int32)
