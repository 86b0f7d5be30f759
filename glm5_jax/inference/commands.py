"""Implements the commands generate and evaluate."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from absl import logging
from jaxtyping import Float

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import (
    conversation,
    engine,
    id_files,
    limits,
    placement,
    scoring,
    terminal,
)
from glm5_jax.processes import together
from glm5_jax.weights import generation_config, loading, quantized_loading

Chat = templates.Version | Literal["auto"]
_DEFAULT_TOKENS = 128  # new ones of a prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt to continue: a text, or rows of ids.

    Attributes:
      text: the prompt as text.
      tokens: path of an .npy file of ids, [T] or [N, T].
      chat: version of the chat template in which the text is a user's message; "auto"
        is the run's.
      special_tokens: whether special tokens spelt out in the text become their ids.
    """

    text: str | None = None
    tokens: str | None = None
    chat: Chat | None = None
    special_tokens: bool = False

    def __post_init__(self) -> None:
        """Checks that the flags go together.

        Raises:
          InputError: not exactly one of text and tokens is given, or an option of texts
            is given for tokens.
        """
        _require_one(prompt=self.text, tokens=self.tokens)
        if self.tokens is not None and (self.chat or self.special_tokens):
            raise config_lib.InputError(
                "--chat and --special_tokens need --prompt; --tokens gives ids, which "
                "are used unchanged. Leave one of the two out."
            )
        if self.chat and self.special_tokens:
            raise config_lib.InputError(
                "--chat writes the special tokens itself; leave --special_tokens out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of a continuation.

    Attributes:
      max_new_tokens: upper bound on the new tokens; None is 128, or in a conversation
        what there is room for.
      temperature: None takes the value of the model's generation_config.json.
      top_p: None takes the value of the model's generation_config.json.
      seed: of the random numbers.
      ignore_eos: whether to continue past the end of the text or turn.
      num_drafts: tokens that multi-token prediction drafts in a round.
      scheme: of quantization to which weights are rounded as they are read.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0
    ignore_eos: bool = False
    num_drafts: int = 0
    scheme: str = quantized_loading.STORED


def generate(
    checkpoint: str,
    overrides: Sequence[command_line.Override],
    prompt: Prompt,
    sampling: Sampling,
    tokens_out: str | None = None,
    show: Callable[[list[str]], object] = lambda texts: None,
) -> list[str]:
    """Continues a text or every row of an .npy file, or answers a chat message.

    Writes prompts and continuations to `tokens_out`, with as many dims as the prompt's
    ids have (one for a text), padded with pad_token_id, or 0. `show` gets the result
    before the file is written, which may fail.

    Returns:
      Each prompt with its continuation, as text, or as ids without a tokenizer; in a
      chat only the answer. Nothing on processes but the first; all must call it alike.

    Raises:
      InputError: see `quantized_loading.load_model` and `engine.generate`.
      OSError: `tokens_out` cannot be written.
    """
    id_files.require_folder_of(tokens_out)
    ids = None if prompt.tokens is None else id_files.read_ids(prompt.tokens)
    mesh, overrides = loading.mesh_of(overrides)
    config, params, tokenizer = quantized_loading.load_model(
        checkpoint, overrides, mesh, sampling.scheme
    )
    if ids is not None:
        prompts = np.atleast_2d(ids).tolist()
    elif tokenizer is not None:
        prompt = _with_version(prompt, tokenizer, checkpoint)
        prompts = [read_prompt(prompt, tokenizer)]
    else:
        raise _no_tokenizer(checkpoint)
    ends = stop_ids(config, tokenizer, prompt.chat if ids is None else None)
    temperature, top_p = _settled(sampling, checkpoint)
    _require_same(config, prompts, sampling, (temperature, top_p))
    logging.info("Compiling and sampling ...")
    with placement.using(mesh):
        completions = engine.generate(
            params,
            config,
            prompts,
            max_new_tokens=_number_of(sampling),
            temperature=temperature,
            top_p=top_p,
            stop_ids=() if sampling.ignore_eos else ends,
            seed=sampling.seed,
            num_drafts=sampling.num_drafts,
        )
    rows = [[*p, *c.tokens] for p, c in zip(prompts, completions, strict=True)]
    if not together.is_first():
        return []
    texts = _texts(rows, completions, prompt, tokenizer, ends)
    show(texts)
    if tokens_out is not None:
        is_single = ids is None or ids.ndim == 1
        id_files.save_rows(tokens_out, rows, config.pad_token_id or 0, is_single)
    return texts


def _texts(
    rows: list[list[int]],
    completions: list[engine.Completion],
    prompt: Prompt,
    tokenizer: tokenizer_lib.Tokenizer | None,
    ends: frozenset[int],
) -> list[str]:
    """Returns what `generate` prints."""
    if tokenizer is None:
        return [" ".join(map(str, row)) for row in rows]
    if prompt.chat:
        answer = completions[0].tokens
        has_ended = bool(answer) and answer[-1] in ends
        return [tokenizer.spell(answer[:-1] if has_ended else answer)]
    show = tokenizer.spell if prompt.special_tokens else tokenizer.decode
    return [show(row) for row in rows]


def _number_of(sampling: Sampling) -> int:
    """Returns the most new tokens of a prompt."""
    given = sampling.max_new_tokens
    return _DEFAULT_TOKENS if given is None else given


def _settled(sampling: Sampling, checkpoint: str) -> tuple[float, float]:
    """Returns temperature and top_p, with the model's own as defaults."""
    temperature, top_p = generation_config.sampling_defaults(checkpoint)
    if sampling.temperature is not None:
        temperature = sampling.temperature
    if sampling.top_p is not None:
        top_p = sampling.top_p
    return temperature, top_p


def stop_ids(
    config: config_lib.ModelConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
    chat: Chat | None = None,
) -> frozenset[int]:
    """Returns the ids that end a continuation, or an answer in a chat."""
    ends = {*config.eos_token_id}
    if tokenizer is not None:
        ends.add(tokenizer.eos_id)
        if chat:
            ends |= templates.Template(tokenizer).stop_ids
    return frozenset(i for i in ends if i < config.vocab_size)  # others are never drawn


def read_prompt(prompt: Prompt, tokenizer: tokenizer_lib.Tokenizer) -> list[int]:
    """Returns the ids of a prompt's text.

    Raises:
      InputError: the tokenizer lacks special tokens of the chat template.
    """
    text = prompt.text or ""
    if prompt.chat:
        _require_chat(tokenizer)
        assert prompt.chat != "auto"
        template = templates.Template(tokenizer, prompt.chat)
        said = [{"role": "user", "content": text}]
        return template.render(said, add_generation_prompt=True).tokens
    encode = tokenizer.encode_spelt if prompt.special_tokens else tokenizer.encode
    return encode(text)


def _with_version(
    prompt: Prompt, tokenizer: tokenizer_lib.Tokenizer, checkpoint: str
) -> Prompt:
    """Returns a prompt whose chat is not "auto"."""
    if prompt.chat != "auto":
        return prompt
    _require_chat(tokenizer)
    template = template_of(tokenizer, loading.find(checkpoint), None)
    assert template is not None
    return dataclasses.replace(prompt, chat=template.version)


def template_of(
    tokenizer: tokenizer_lib.Tokenizer | None,
    source: loading.Source,
    version: templates.Version | None,
) -> templates.Template | None:
    """Returns the chat template, as the run was trained with it; None if it has none.

    Args:
      tokenizer: of the model.
      source: of the model; a release has the version in its chat_template.jinja.
      version: takes precedence over the source's.
    """
    if tokenizer is None or {*templates.SPECIAL_TOKENS} - {*tokenizer.special_ids}:
        return None
    data = source.settings.get("data", {})
    file = source.folder / "chat_template.jinja"
    if version is None and source.is_huggingface and file.exists():
        version = templates.released_version(file.read_text(encoding="utf-8"))
        if version is None:
            logging.warning(
                "%s is none of GLM-5, 5.1 and 5.2; conversations get GLM-5's.", file
            )
    return templates.Template(
        tokenizer,
        version or data.get("chat_template", "glm5"),
        enable_thinking=data.get("enable_thinking", True),
    )


def converse(
    checkpoint: str,
    overrides: Sequence[command_line.Override],
    version: Chat,
    sampling: Sampling,
) -> None:
    """Holds a conversation in the terminal, until its input ends.

    Args:
      checkpoint: of the model.
      overrides: of its config.
      version: of the chat template.
      sampling: of the answers.

    Raises:
      InputError: see `quantized_loading.load_model`; or the model has no chat template.
    """
    mesh, overrides = loading.mesh_of(overrides)
    config, params, tokenizer = quantized_loading.load_model(
        checkpoint, overrides, mesh, sampling.scheme
    )
    if tokenizer is None:
        raise _no_tokenizer(checkpoint)
    _require_chat(tokenizer)
    fixed = None if version == "auto" else version
    template = template_of(tokenizer, loading.find(checkpoint), fixed)
    assert template is not None
    temperature, top_p = _settled(sampling, checkpoint)
    with placement.using(mesh):
        made = engine.Engine(
            params,
            config,
            num_slots=placement.least_slots(1),
            capacity=loading.context_length(checkpoint, config),
            seed=sampling.seed,
            limits=limits.Limits(num_drafts=sampling.num_drafts),
        )
    settings = conversation.Settings(
        stop_ids=stop_ids(config, tokenizer),
        max_new_tokens=sampling.max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=sampling.seed,
    )
    talk = conversation.Conversation(made, template, settings)
    logging.info("Type /help for commands.")
    terminal.Terminal(talk).run()


def evaluate(
    checkpoint: str,
    overrides: Sequence[command_line.Override],
    *,
    tokens: str | None,
    text: str | None,
    logits_out: str | None,
    scheme: str = quantized_loading.STORED,
) -> dict[str, Any]:
    """Scores the rows of an .npy file from their second token on, or a text file.

    Writes the logits of every position to `logits_out`, float32 [N, T, V].

    Returns:
      The figures that evaluate.py prints; nothing on processes but the first, all of
      which must call it alike.

    Raises:
      InputError: see `quantized_loading.load_model` and `scoring.score`.
    """
    _require_one(tokens=tokens, text=text)
    id_files.require_folder_of(logits_out)
    ids = None if tokens is None else np.atleast_2d(id_files.read_ids(tokens))
    written = None if text is None else scoring.read_text(text)
    mesh, overrides = loading.mesh_of(overrides)
    config, params, tokenizer = quantized_loading.load_model(
        checkpoint, overrides, mesh, scheme
    )
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
        logits = _room_for(logits_out, shape)
    _require_same(config, *(x.tobytes().hex() for x in rows.values()), logits_out)
    logging.info("Compiling and scoring ...")
    with placement.using(mesh):
        nll = scoring.score(params, config, rows, logits)
    return scoring.summarize(rows, nll) if together.is_first() else {}


def _require_same(config: config_lib.ModelConfig, *inputs: Any) -> None:
    """Checks that all processes were given the same, whose programs must be equal."""
    together.require_same("settings or inputs", repr((config, inputs)))


def _room_for(path: str, shape: tuple[int, ...]) -> Float[np.ndarray, "*n"]:
    """Returns an array that is a file in the first process; others keep one number."""
    if together.is_first():
        return id_files.room_for_logits(path, shape)
    return np.lib.stride_tricks.as_strided(
        np.empty((), np.float32), shape, [0] * len(shape)
    )


def _require_one(**given: str | None) -> None:
    """Checks that exactly one of two flags has a value."""
    values = [name for name, value in given.items() if value is not None]
    if len(values) != 1:
        names = " or ".join(f"--{name}" for name in given)
        found = " and ".join(f"--{name}" for name in values) or "neither"
        raise config_lib.InputError(f"Give either {names}, got {found}.")


def _require_chat(tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Checks that a tokenizer has the chat template's special tokens."""
    missing = set(tokenizer_lib.SPECIAL_TOKENS) - set(tokenizer.special_ids)
    if missing:
        raise config_lib.InputError(
            f"--chat needs special tokens that this model's tokenizer lacks: "
            f"{' '.join(sorted(missing))}; leave --chat out."
        )


def _no_tokenizer(checkpoint: str) -> config_lib.InputError:
    return config_lib.InputError(
        f"{checkpoint} has no tokenizer.json, so text cannot be encoded; copy one "
        f"there, or give --tokens=ids.npy."
    )
