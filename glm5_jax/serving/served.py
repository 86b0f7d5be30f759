"""The model that a server serves, with all that requests are checked against."""

import asyncio
import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.http_server import errors
from glm5_jax.inference import grammars as grammars_lib
from glm5_jax.inference import service as service_lib
from glm5_jax.rl.weight_store import sources
from glm5_jax.serving import fetching
from glm5_jax.serving import letters as letters_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A model behind an engine.

    Attributes:
        name: the name by which clients ask for it.
        service: the engine's driver.
        tokenizer: None if the model has none; then only token ids are served.
        template: the chat template; None if the tokenizer lacks its special tokens.
        stop_ids: ids that end a text; those of a chat are the template's too.
        defaults: sampling settings of `Request` that a body need not name.
        is_seeded: whether requests without a seed take numbers one after another, as a
            restarted server does again; otherwise each draws a seed of its own.
        max_seconds: for an answer.
        max_dispatch_seconds: of the engine, above which it is taken to hang.
        routed_experts: whether the engine records the experts of each token.
        weights_root: folder below which clients may name new weights; None forbids it.
        weights_far: where versions are read that the folder lacks.
        fetcher: of prompts that other servers read; None reads all of them here.
        created: Unix time.
    """

    name: str
    service: service_lib.Service
    tokenizer: tokenizer_lib.Tokenizer | None = None
    template: templates.Template | None = None
    stop_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_seeded: bool = False
    max_seconds: float = 3600.0
    max_dispatch_seconds: float = 600.0  # of which the first ones compile
    routed_experts: bool = False
    weights_root: pathlib.Path | None = None
    weights_far: sources.Url | None = None
    fetcher: fetching.Fetcher | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def require_name(self, name: str | None) -> None:
        """Checks the model that a request names.

        Raises:
            ApiError: it is another one.
        """
        if name is not None and name != self.name:
            raise errors.ApiError(
                404,
                f"The model {name!r} does not exist; this server has {self.name!r}.",
                "model_not_found",
            )

    @functools.cached_property
    def letters(self) -> letters_lib.Letters[Any]:
        """Returns what wakes the event loop, the one that runs at the first use."""
        return letters_lib.Letters(asyncio.get_running_loop())

    @functools.cached_property
    def grammars(self) -> grammars_lib.Grammars:
        """Returns the compiler of grammars.

        Raises:
            ApiError: there is no tokenizer.
        """
        return grammars_lib.Grammars(self.text, self.service.config.vocab_size)

    @property
    def text(self) -> tokenizer_lib.Tokenizer:
        """Returns the tokenizer.

        Raises:
            ApiError: there is none.
        """
        if self.tokenizer is None:
            raise errors.bad_request(
                "This model has no tokenizer; send token ids to /inference/v1/generate."
            )
        return self.tokenizer

    @property
    def chat(self) -> templates.Template:
        """Returns the chat template.

        Raises:
            ApiError: the tokenizer lacks special tokens.
        """
        if self.template is None:
            raise errors.bad_request(
                "This model's tokenizer lacks the special tokens of the chat template; "
                "use /v1/completions."
            )
        return self.template

    def room(self, prompt_size: int) -> int:
        """Returns how many tokens may follow a prompt.

        Raises:
            ApiError: the prompt leaves no room.
        """
        left = self.service.capacity - prompt_size
        if left < 1:
            raise errors.bad_request(
                f"The prompt has {prompt_size} tokens, but prompt and answer together "
                f"may have at most {self.service.capacity}. Shorten the prompt.",
                "context_length_exceeded",
            )
        return left
