"""The kept episodes of a run as one HTML file, with what belongs to each token.

The file needs no server and no network. transcripts.html shows what `content` returns.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.rl import advantages, episode_files, gateway
from glm5_jax.rl import episodes as episodes_lib

_PAGE = pathlib.Path(__file__).parent / "transcripts.html"
_PLACE = "/*CONTENT*/"
_PLACES = 4  # decimal places of a log-prob, and of an advantage


def page(
    config: config_lib.TrainConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    steps: Sequence[episode_files.Step],
    title: str,
) -> str:
    """Returns the HTML of some steps."""
    found = json.dumps(
        {"title": title, **content(config, tokenizer, steps)}, separators=(",", ":")
    )
    # No text of a model can end the script that holds it.
    return _PAGE.read_text(encoding="utf-8").replace(
        _PLACE, found.replace("<", "\\u003c")
    )


def content(
    config: config_lib.TrainConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    steps: Sequence[episode_files.Step],
) -> dict[str, Any]:
    """Returns what the page shows: the steps, and the text of every token in them.

    Args:
      config: of the run.
      tokenizer: of the run.
      steps: to show.
    """
    used: set[int] = set()
    shown = [_step(config.rl, step, used) for step in steps]
    names = {token: name for name, token in tokenizer.special_ids.items()}
    pieces = {
        token: names.get(token) or _text(tokenizer, token) for token in sorted(used)
    }
    return {"steps": shown, "pieces": pieces}


def _text(tokenizer: tokenizer_lib.Tokenizer, token: int) -> str:
    """Returns the text of an id; a model may have more ids than its tokenizer."""
    if token >= tokenizer.vocab_size:
        return f"<{token}>"
    return tokenizer.pieces[token].decode("utf-8", "backslashreplace")


def _step(
    rl: config_lib.RLConfig, step: episode_files.Step, used: set[int]
) -> dict[str, Any]:
    """Returns the episodes of a step, each once; adds their token ids to `used`."""
    shown: dict[int, dict[str, Any]] = {}
    of_tokens = step.advantages
    for number, group in enumerate(step.groups):
        for episode, value in zip(group, _advantages(rl, group), strict=True):
            if (known := shown.get(id(episode))) is not None:
                known["times"] += 1
                continue
            shown[id(episode)] = {
                **_episode(episode, step.position, used, of_tokens),
                "group": number,
                "advantage": value,
                "times": 1,
            }
    for episode in step.unused:
        shown[id(episode)] = {
            **_episode(episode, step.position, used, of_tokens),
            "group": None,
            "advantage": None,
            "times": 0,
        }
    return {
        "step": step.step,
        "version": step.position,
        "episodes": [*shown.values()],
    }


def _advantages(
    rl: config_lib.RLConfig, group: Sequence[episodes_lib.Episode]
) -> list[float | None]:
    """Returns the advantage of each episode; None: each token has its own."""
    if not rl.compares_groups:
        return [None] * len(group)
    rewards = [e.reward.total for e in group if e.reward is not None]
    values = advantages.group_advantages(rewards, rl.advantage_std)
    return [round(float(value), _PLACES) for value in values]


def _episode(
    episode: episodes_lib.Episode,
    version: int,
    used: set[int],
    of_tokens: Mapping[int, episode_files.Floats],
) -> dict[str, Any]:
    reward = episode.reward
    for sample in episode.samples:
        used.update(sample.tokens)
    return {
        "task": episode.task.id,
        "tag": episode.task.tag,
        "label": episode.label.value,
        "reason": episode.reason,
        "reward": None if reward is None else reward.total,
        "parts": {} if reward is None else dict(reward.parts),
        "samples": [
            _sample(sample, version, of_tokens.get(id(sample)))
            for sample in episode.samples
        ],
    }


def _sample(
    sample: gateway.Sample, version: int, values: episode_files.Floats | None
) -> dict[str, Any]:
    """Returns ids, and for each: log-prob and versions behind; null if not sampled.

    And the advantages that a critic gave, or null.
    """
    pairs = zip(sample.mask, sample.logprobs, sample.versions, strict=True)
    drawn = [
        (round(logprob, _PLACES), version - own) if is_sampled else (None, None)
        for is_sampled, logprob, own in pairs
    ]
    return {
        "tokens": sample.tokens,
        "logprobs": [logprob for logprob, _ in drawn],
        "behind": [behind for _, behind in drawn],
        "advantages": None if values is None else [*map(_told, sample.mask, values)],
    }


def _told(is_sampled: bool, value: float) -> float | None:
    return round(float(value), _PLACES) if is_sampled and math.isfinite(value) else None
