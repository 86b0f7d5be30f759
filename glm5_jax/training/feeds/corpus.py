"""The feed of the stages that predict next tokens: texts, or conversations."""

import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.config import checks
from glm5_jax.data.chat import templates
from glm5_jax.data.preparation import prepared
from glm5_jax.data.rows import pipeline as pipeline_lib
from glm5_jax.data.rows import sft
from glm5_jax.inference import engine
from glm5_jax.training import step as step_lib
from glm5_jax.training.feeds import feed
from glm5_jax.training.feeds import player as player_lib
from glm5_jax.training.reporting import accounting

SAMPLE_TEMPERATURE = 0.7


class Corpus:
    """A pipeline of packed rows, as a `feed.Feed`."""

    is_on_policy = False
    tells_of_stalls = False

    def __init__(self, config: config_lib.TrainConfig) -> None:
        """Opens the corpus that config.data names.

        Raises:
          InputError: source or tokenizer cannot be used.
        """
        self._config = config
        self._pipeline = _make_pipeline(config)
        self._eval_step = jax.jit(step_lib.make_eval_step(config))
        self._batches: tuple[int, Iterator[feed.Batch]] | None = None
        self.tokenizer = self._pipeline.tokenizer
        if config.sample_tokens:  # an error now, not after hours of training
            self._require_sample()
        self.fingerprint = self._pipeline.fingerprint
        self._player: player_lib.Player | None = None
        if config.eval_success:
            taskset = environments.make(config.rl.environment)
            template = templates.make_template(config.data, self.tokenizer)
            self._player = player_lib.Player(config, taskset, template)

    def begin(self, workdir: pathlib.Path, step: int) -> None:
        """Does nothing."""

    def restrict_to(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Makes only these rows of each batch from now on, by the size of a batch."""
        self._pipeline.restrict_to(rows)

    def prepare(self, params: dict, to_devices: feed.ToDevices) -> None:
        """Evaluates one batch and draws the sample, so that both are compiled.

        What does not fit the devices is found before the first step.
        """
        for batch in self._pipeline.eval_batches(1, self._pipeline.held_out_names[0]):
            jax.block_until_ready(self._eval_step(params, to_devices(batch)))
        if self._config.sample_tokens:
            self.sample(params)

    def next(self, params: dict, position: int) -> tuple[feed.Batch, feed.Metrics]:
        """Returns a batch; a thread makes the next ones ahead."""
        if self._batches is None or self._batches[0] != position:
            self._batches = position, self._pipeline.train_iterator(position)
        batches = self._batches[1]
        self._batches = position + 1, batches
        batch, metrics = next(batches), self._metrics(position + 1)
        of_documents = self._documents(batch, metrics["data/batch_tokens"])
        return batch, {**metrics, **of_documents}

    def keep(self, step: int, advantages: jax.Array | None) -> None:
        """Does nothing: the seed and the position give the batch again."""

    def check(self, metrics: feed.Metrics, step: int) -> None:
        """Does nothing: the loop itself catches gradients that are not finite."""

    def evaluate(
        self, params: dict, position: int, to_devices: feed.ToDevices
    ) -> dict[str, float]:
        """Returns held-out bits per byte: -log2 of a text's probability over its bytes.

        A mixture also has the figure of each source; every source gives up to
        eval_batches batches to the total, in which all tokens count alike. With
        eval_success, success on held-out tasks is added.
        """
        names, totals = self._pipeline.held_out_names, {}
        for name in names:
            totals[name] = np.zeros(2)
            for batch in self._pipeline.eval_batches(self._config.eval_batches, name):
                totals[name] += jax.device_get(
                    self._eval_step(params, to_devices(batch))
                )
        bits = {"eval/bits_per_byte": _bits_per_byte(np.sum([*totals.values()], 0))}
        if len(names) > 1:
            for name, total in totals.items():
                bits[f"eval/bits_per_byte/{name}"] = _bits_per_byte(total)
        if self._player is None:
            return bits
        return bits | self._player.evaluate(params, position)

    def evaluate_beside(self, params: dict, position: int) -> bool:
        """Begins none: the devices that learn are those that evaluate."""
        return False

    def _metrics(self, num_batches: int) -> feed.Metrics:
        """Returns what to log after `num_batches` batches."""
        batches, epochs = self._config.data.batches, self.epochs(num_batches)
        tokens = batches.tokens_before(num_batches)
        return {
            "data/tokens": tokens,
            "data/batch_tokens": tokens - batches.tokens_before(num_batches - 1),
            **{f"data/epochs/{name}".rstrip("/"): e for name, e in epochs.items()},
        }

    def _documents(self, batch: feed.Batch, num_tokens: int) -> feed.Metrics:
        """Returns what the documents of a batch of `num_tokens` tokens need.

        A process of several counts in its own rows, and takes the others' to be alike.
        """
        segments = batch["segment_ids"]
        flops = accounting.flops_of_documents(self._config.model, segments)
        share = segments.size / num_tokens
        return {
            "data/padding": 1 - np.count_nonzero(segments) / segments.size,
            "data/document_flops": flops / share,
        }

    def sample(self, params: dict) -> str:
        """Returns sample_prompt with its continuation, or with the answer to it."""
        config, template = self._config, self._pipeline.template
        prompt = self._prompt()
        completion = engine.generate(
            params,
            config.model,
            [prompt],
            max_new_tokens=config.sample_tokens,
            temperature=SAMPLE_TEMPERATURE,
            stop_ids=template.stop_ids if template else (),
            seed=config.seed,
        )[0]
        spell = self.tokenizer.spell if template else self.tokenizer.decode
        return spell([*prompt, *completion.tokens])

    def _prompt(self) -> list[int]:
        """Returns the ids of sample_prompt; in a chat it is a user's message."""
        text, template = self._config.sample_prompt, self._pipeline.template
        if template is None:
            return self.tokenizer.encode(text)
        question = {"role": "user", "content": text}
        return list(template.render([question], add_generation_prompt=True).tokens)

    def _require_sample(self) -> None:
        """Checks that sample_prompt can be continued by sample_tokens."""
        config, size = self._config, len(self._prompt())
        limit = config.model.max_position_embeddings
        checks.require(
            (size > 0, "sample_prompt must not be empty; or set sample_tokens=0."),
            (
                size + config.sample_tokens <= limit,
                f"sample_tokens must leave room for sample_prompt in "
                f"model.max_position_embeddings={limit}, got {config.sample_tokens} "
                f"and a prompt of {size} tokens.",
            ),
        )

    def memory(self, position: int) -> Mapping[str, Any]:
        """Returns nothing: a batch is a function of its position."""
        return {}

    def resume(self, memory: Mapping[str, Any]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def epochs(self, num_batches: int) -> dict[str, float]:
        """Returns how often `num_batches` batches have read each source."""
        return self._pipeline.epochs(num_batches)


def _make_pipeline(config: config_lib.TrainConfig) -> pipeline_lib.Pipeline:
    """Opens rows of the kind that the stage learns from, prepared or read now."""
    kind = config.stage_record.feed
    assert kind in ("text", "conversations"), "rollouts are no corpus"
    if prepared.is_prepared(config.data):
        return prepared.make_pipeline(config.data, config.seed, kind)
    source = {"text": pipeline_lib, "conversations": sft}[kind]
    return source.make_pipeline(config.data, config.seed)


def _bits_per_byte(total: np.ndarray) -> float:
    """Returns bits per byte, from nats and bytes."""
    nats, num_bytes = total
    return float(nats / math.log(2) / num_bytes)
