"""Implements the command serve."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from absl import logging

from glm5_jax import command_line, config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.http_server import guard, listening
from glm5_jax.inference import commands, engine, leader, placement
from glm5_jax.inference import limits as limits_lib
from glm5_jax.inference import service as service_lib
from glm5_jax.processes import together
from glm5_jax.rl.weight_store import sources
from glm5_jax.serving import app, fetching, for_prefill, served
from glm5_jax.serving.router import pool
from glm5_jax.weights import generation_config, hub, loading, quantized_loading

_MAX_STOP_IDS = 32  # of a request, the model's own included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a server.

    Attributes:
      host: address to listen at.
      port: number to listen at; 0 takes a free one.
      api_key: that clients must send; None asks for none.
      name: of the model, for clients; None takes its folder's.
      template: version of the chat template; None takes the run's, or glm5.
      num_slots: sequences that are decoded at the same time.
      num_pages: pages of the cache that prompts share; 0 gives each slot its own rows.
      num_drafts: most tokens that multi-token prediction drafts in a round; 0: none.
      acceptance: how drafts are accepted, see `Limits`.
      host_pages: pages in the host's memory, for prompts that come again later.
      capacity: most tokens of prompt and answer; 0 takes the length of training.
      warm_up: whether to compile all programs first, so that no request waits for it.
      seed: of the random numbers; None draws one for each request without its own.
      routed_experts: whether answers in token ids can tell the experts of each token.
      weights_root: folder below which clients may name new weights; None forbids it.
      weights_url: of a weight store, whose versions are read where the folder lacks
        them.
      max_concurrency: requests that are answered at the same time.
      drain_seconds: for answers under way, after SIGTERM.
      prefill_servers: addresses of servers that read long prompts for this one.
      min_prefill_tokens: new tokens of a prompt that are worth asking them.
      quantize: the scheme to round the weights to; "stored" keeps them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None
    template: templates.Version | None = None
    num_slots: int = 8
    num_pages: int = 0
    num_drafts: int = 0
    acceptance: limits_lib.Acceptance = "same_noise"
    host_pages: int = 0
    capacity: int = 0
    warm_up: bool = False
    seed: int | None = None
    routed_experts: bool = False
    weights_root: str | None = None
    weights_url: str | None = None
    max_concurrency: int = 256
    drain_seconds: int = 60
    prefill_servers: Sequence[str] = ()
    min_prefill_tokens: int = for_prefill.MIN_TOKENS
    quantize: str = quantized_loading.STORED

    def __post_init__(self) -> None:
        """Checks that the server is not open to everybody.

        Raises:
          InputError: other machines may ask without a key, or the key is empty.
        """
        listening.require_key(self.host, self.api_key)

    @property
    def is_loopback(self) -> bool:
        """Returns whether this machine alone can ask."""
        return self.host in guard.LOOPBACK


def serve(
    checkpoint: str, overrides: Sequence[command_line.Override], options: Options
) -> None:
    """Serves a model until SIGTERM or ctrl-C; the port is closed until it is loaded.

    Of several processes the first one serves, with the devices of all.

    Raises:
      InputError: see `loaded`; or the address cannot be used.
    """
    if not together.is_first():
        made, _ = _engine(checkpoint, overrides, options)
        assert isinstance(made, leader.Member), "this is one of several processes"
        leader.follow(made)
        return
    limits = guard.Limits(
        api_key=options.api_key,
        max_concurrency=options.max_concurrency,
        is_loopback=options.is_loopback,
    )
    with (
        contextlib.closing(listening.bind(options.host, options.port)) as listener,
        loaded(checkpoint, overrides, options) as model,
    ):
        if options.warm_up:
            model.service.call(lambda made: made.warm_up(_reporter())).result()
        host, port = listener.getsockname()[:2]
        logging.info("Serving %s at http://%s:%d", model.name, host, port)
        door = app.make(model, limits)
        server = listening.make_server(door, options.drain_seconds)
        server.run(sockets=[listener])


@contextlib.contextmanager
def loaded(
    checkpoint: str, overrides: Sequence[command_line.Override], options: Options
) -> Iterator[served.Served]:
    """Yields a model behind an engine, whose thread ends after the block.

    Raises:
      InputError: see `quantized_loading.load_model` and `engine.Engine`.
    """
    source = loading.find(checkpoint)
    defaults = generation_config.sampling_settings(checkpoint)
    made, tokenizer = _engine(checkpoint, overrides, options)
    name = options.name or _name(checkpoint, source)
    with contextlib.ExitStack() as stack:
        if isinstance(made, leader.Leader):
            stack.callback(made.dismiss)
        service = stack.enter_context(contextlib.closing(service_lib.Service(made)))
        yield served.Served(
            name=name,
            service=service,
            tokenizer=tokenizer,
            template=commands.template_of(tokenizer, source, options.template),
            stop_ids=commands.stop_ids(made.config, tokenizer),
            defaults=defaults,
            is_seeded=options.seed is not None,
            routed_experts=options.routed_experts,
            weights_root=_folder(options.weights_root),
            weights_far=_far_store(options),
            fetcher=_fetcher(service, name, options),
        )


def _engine(
    checkpoint: str, overrides: Sequence[command_line.Override], options: Options
) -> tuple[engine.Engine, tokenizer_lib.Tokenizer | None]:
    """Returns an engine and the tokenizer; of several processes the first one leads.

    Raises:
      InputError: see `loaded`; or several processes cannot do what is asked for.
    """
    mesh, overrides = loading.mesh_of(overrides)
    make: type[engine.Engine] = engine.Engine
    if jax.process_count() > 1:
        together.require_same("settings", repr((checkpoint, overrides, options)))
        make = leader.Leader if together.is_first() else leader.Member
    model_config, params, tokenizer = quantized_loading.load_model(
        checkpoint, overrides, mesh, options.quantize
    )
    length = loading.context_length(checkpoint, model_config)
    with placement.using(mesh):
        made = make(
            params,
            model_config,
            num_slots=options.num_slots,
            capacity=options.capacity or length,
            seed=options.seed or 0,
            with_experts=options.routed_experts,
            limits=limits_lib.Limits(
                max_stop_ids=_MAX_STOP_IDS,
                with_adjustments=True,
                num_pages=options.num_pages,
                num_drafts=options.num_drafts,
                acceptance=options.acceptance,
                host_pages=options.host_pages,
            ),
        )
    return made, tokenizer


def _name(checkpoint: str, source: loading.Source) -> str:
    """Returns the name of a model on the hub, or that of its folder."""
    return checkpoint if hub.is_name(checkpoint) else source.folder.name


def _fetcher(
    service: service_lib.Service, name: str, options: Options
) -> fetching.Fetcher | None:
    """Returns what lets other servers read prompts, if there are any.

    Raises:
      InputError: an address is none, or there is no room for their pages.
    """
    if not options.prefill_servers:
        return None
    if not options.host_pages:
        raise config.InputError(
            "--prefill_servers needs --num_pages and --host_pages, which hold what "
            "they send."
        )
    settings = fetching.Settings(
        urls=[pool.checked(url) for url in options.prefill_servers],
        api_key=options.api_key,
        least_tokens=options.min_prefill_tokens,
    )
    return fetching.Fetcher(service, name, settings)


def _folder(path: str | None) -> pathlib.Path | None:
    """Returns the folder at a path.

    Raises:
      InputError: there is none.
    """
    if path is not None and not pathlib.Path(path).is_dir():
        raise config.InputError(f"--weights_root={path} is no folder; make it first.")
    return None if path is None else pathlib.Path(path)


def _far_store(options: Options) -> sources.Url | None:
    """Returns the store that is not a folder of this machine, if there is one.

    Raises:
      InputError: the address is none, or no client may name weights.
    """
    url = options.weights_url
    if url is None:
        return None
    if options.weights_root is None:
        raise config.InputError(
            "--weights_url needs --weights_root, a folder, which may be empty: "
            "clients may name weights only where there is one."
        )
    if not url.startswith(("http://", "https://")):
        raise config.InputError(
            f"--weights_url must look like http://HOST:PORT, got {url!r}."
        )
    return sources.Url(url, options.api_key)


def _reporter() -> Callable[[int, int], None]:
    """Returns what logs how many programs are compiled, and how long the rest takes."""
    began = time.monotonic()

    def report(done: int, number: int) -> None:
        left = (time.monotonic() - began) / done * (number - done)
        logging.info("Compiled program %d of %d; %.0f s left.", done, number, left)

    return report
