"""A model in a few lines: from a folder or a preset to logits, text and batches.

    model = glm5_jax.load("runs/NAME")
    print(model.generate("def ", max_new_tokens=32))

Everything here calls what the commands call. `import glm5_jax` alone does not import
this file, nor jax.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.data.rows import packing
from glm5_jax.inference import commands, engine, scoring
from glm5_jax.model import invariance, transformer
from glm5_jax.weights import generation_config, loading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model's config, parameters and tokenizer.

    `dataclasses.replace(model, params=params)` is the same model with other parameters.

    Attributes:
      config: of the model.
      params: of `transformer.table`, in the types that they are stored in.
      tokenizer: None where the folder has none.
      temperature: of `generate`; 0 takes the likeliest token.
      top_p: of `generate`: the probability to sample from.
    """

    config: config_lib.ModelConfig
    params: dict
    tokenizer: tokenizer_lib.Tokenizer | None = None
    temperature: float = 1.0
    top_p: float = 1.0

    def logits(self, ids: ArrayLike) -> Float[Array, "B T V"]:
        """Returns the scores of the token after each position, float32.

        Args:
          ids: token ids, [T] or [B, T].

        Raises:
          InputError: the model does not have an id, or not as many positions.
        """
        tokens = np.atleast_2d(np.asarray(ids, np.int64))
        scoring.require_ids(tokens, self.config)
        scoring.require_positions(tokens.shape[1], self.config)
        return _logits(self.params, self.config, tokens.astype(np.int32))

    def generate(
        self,
        text: str,
        *,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        chat: templates.Version | None = None,
    ) -> str:
        """Returns what follows a text, without the text.

        Args:
          text: to continue; with `chat`, what a user says.
          max_new_tokens: at most so many; an end of text or of turn ends it earlier.
          temperature: None is the model's.
          top_p: None is the model's.
          seed: of the random numbers.
          chat: version of the chat template, such as "glm5".

        Raises:
          InputError: there is no tokenizer, or the text is empty or too long.
        """
        tokenizer = self._tokenizer()
        ids = commands.read_prompt(commands.Prompt(text=text, chat=chat), tokenizer)
        stop_ids = commands.stop_ids(self.config, tokenizer, chat)
        [completion] = engine.generate(
            self.params,
            self.config,
            [ids],
            max_new_tokens=max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
            stop_ids=stop_ids,
            seed=seed,
        )
        return tokenizer.decode(i for i in completion.tokens if i not in stop_ids)

    def batch(
        self, texts: Sequence[str], sequence_length: int = 256
    ) -> dict[str, Int[np.ndarray, "B T"] | Float[np.ndarray, "B T"]]:
        """Returns texts as rows of packed documents: what a training step learns from.

        Args:
          texts: each a document, which does not see the others.
          sequence_length: tokens of a row; the last row is padded.

        Raises:
          InputError: there is no tokenizer, or no text.
        """
        tokenizer = self._tokenizer()
        documents = [np.asarray(ids, np.int32) for ids in tokenizer.encode_batch(texts)]
        if not any(ids.size for ids in documents):
            raise config_lib.InputError("The texts are empty; give at least one.")
        packed = packing.pack(
            documents, eos_id=tokenizer.eos_id, sequence_length=sequence_length
        )
        rows = [packed[i] for i in range(len(packed))]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _tokenizer(self) -> tokenizer_lib.Tokenizer:
        if self.tokenizer is None:
            raise config_lib.InputError(
                "The model has no tokenizer; set one: dataclasses.replace(model, "
                "tokenizer=glm5_jax.data.tokenizer.load(PATH))."
            )
        return self.tokenizer


def load(path: str | os.PathLike[str]) -> Model:
    """Reads a model from a run folder, a step folder or a Hugging Face folder.

    Raises:
      InputError: nothing usable is there, or its parts do not fit together.
    """
    path = os.fspath(path)
    config, params, tokenizer = loading.load_model(path)
    temperature, top_p = generation_config.sampling_defaults(path)
    return Model(
        config=config,
        params=params,
        tokenizer=tokenizer,
        temperature=temperature,
        top_p=top_p,
    )


def new(preset: str | config_lib.ModelConfig, seed: int = 0) -> Model:
    """Makes a model with random parameters, which reads bytes.

    Args:
      preset: a name of `presets.MODELS`, such as "glm5_1m", or a config.
      seed: of the parameters.

    Raises:
      InputError: there is no preset of that name.
    """
    if isinstance(preset, str):
        if preset not in presets.MODELS:
            raise config_lib.InputError(
                f"There is no preset {preset!r}; choose one of "
                f"{', '.join(presets.MODELS)}."
            )
        preset = presets.MODELS[preset]
    params = _init_params(preset, jax.random.key(seed))
    return Model(config=preset, params=params, tokenizer=tokenizer_lib.byte_tokenizer())


_init_params = jax.jit(transformer.init_params, static_argnums=0)


@functools.partial(invariance.jit, static_argnames="config")
def _logits(
    params: dict, config: config_lib.ModelConfig, tokens: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """Scores of the next token at every position of whole rows."""
    params = transformer.cast(params, config)
    hidden = transformer.forward(params, config, tokens).hidden
    return transformer.logits(params, config, hidden)
