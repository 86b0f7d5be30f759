"""Implements the command serve."""

import contextlib
import dataclasses
import signal
import socket
import threading
from collections.abc import Iterator, Sequence

import uvicorn
from absl import logging

from glm5_jax import command_line, config
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import commands, engine, placement
from glm5_jax.inference import limits as limits_lib
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import app, guard, served
from glm5_jax.weights import loading

_MAX_PORT = 2**16 - 1
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
      capacity: most tokens of prompt and answer; 0 takes the length of training.
      warm_up: whether to compile all programs first, so that no request waits for it.
      seed: of the random numbers.
      max_concurrency: requests that are answered at the same time.
      drain_seconds: for answers under way, after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None
    template: templates.Version | None = None
    num_slots: int = 8
    num_pages: int = 0
    capacity: int = 0
    warm_up: bool = False
    seed: int = 0
    max_concurrency: int = 256
    drain_seconds: int = 60

    def __post_init__(self) -> None:
        """Checks that the server is not open to everybody.

        Raises:
          InputError: other machines may ask without a key, or the key is empty.
        """
        if self.api_key is not None and not self.api_key.strip():
            raise config.InputError("--api_key is empty; give a key, or leave it out.")
        if self.api_key is None and not self.is_loopback:
            raise config.InputError(
                f"--host={self.host} lets other machines ask, so --api_key must be "
                f"set; or listen at 127.0.0.1."
            )

    @property
    def is_loopback(self) -> bool:
        """Returns whether this machine alone can ask."""
        return self.host in guard.LOOPBACK


class Server(uvicorn.Server):
    """A server that finishes the answers under way on SIGTERM or ctrl-C, then ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals while it lasts; threads but the main one get none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: signal.signal(n, self.handle_exit) for n in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    checkpoint: str, overrides: Sequence[command_line.Override], options: Options
) -> None:
    """Serves a model until SIGTERM or ctrl-C; the port is closed until it is loaded.

    Raises:
      InputError: see `loaded`; or the address cannot be used.
    """
    limits = guard.Limits(
        api_key=options.api_key,
        max_concurrency=options.max_concurrency,
        is_loopback=options.is_loopback,
    )
    with (
        contextlib.closing(bind(options.host, options.port)) as listener,
        loaded(checkpoint, overrides, options) as model,
    ):
        if options.warm_up:
            model.service.call(lambda made: made.warm_up(_report)).result()
        host, port = listener.getsockname()[:2]
        logging.info("Serving %s at http://%s:%d", model.name, host, port)
        server = make_server(model, limits, options.drain_seconds)
        server.run(sockets=[listener])


@contextlib.contextmanager
def loaded(
    checkpoint: str, overrides: Sequence[command_line.Override], options: Options
) -> Iterator[served.Served]:
    """Yields a model behind an engine, whose thread ends after the block.

    Raises:
      InputError: see `loading.load_model` and `engine.Engine`.
    """
    mesh, overrides = loading.mesh_of(overrides)
    source = loading.find(checkpoint)
    model_config, params, tokenizer = loading.load_model(checkpoint, overrides, mesh)
    defaults = loading.sampling_settings(checkpoint)
    length = loading.context_length(checkpoint, model_config)
    with placement.using(mesh):
        made = engine.Engine(
            params,
            model_config,
            num_slots=options.num_slots,
            capacity=options.capacity or length,
            seed=options.seed,
            limits=limits_lib.Limits(
                max_stop_ids=_MAX_STOP_IDS,
                with_adjustments=True,
                num_pages=options.num_pages,
            ),
        )
    with contextlib.closing(service_lib.Service(made)) as service:
        yield served.Served(
            name=options.name or source.folder.name,
            service=service,
            tokenizer=tokenizer,
            template=template_of(tokenizer, source, options.template),
            stop_ids=commands.stop_ids(model_config, tokenizer),
            defaults=defaults,
        )


def make_server(
    model: served.Served, limits: guard.Limits, drain_seconds: int
) -> Server:
    """Returns the HTTP server of a model; its `run` takes the sockets."""
    settings = uvicorn.Config(
        app.make(model, limits),
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
    )
    return Server(settings)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket with an address, at which it does not listen yet.

    Raises:
      InputError: the address cannot be used.
    """
    if not 0 <= port <= _MAX_PORT:
        raise config.InputError(f"--port must lie in 0..{_MAX_PORT}, got {port}.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
    except OSError as error:
        raise _unusable(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _unusable(host, port, error) from error
    return bound


def template_of(
    tokenizer: tokenizer_lib.Tokenizer | None,
    source: loading.Source,
    version: templates.Version | None,
) -> templates.Template | None:
    """Returns the chat template, as the run was trained with it; None if it has none.

    Args:
      tokenizer: of the model.
      source: of the model.
      version: takes precedence over the run's.
    """
    if tokenizer is None or {*templates.SPECIAL_TOKENS} - {*tokenizer.special_ids}:
        return None
    data = source.settings.get("data", {})
    return templates.Template(
        tokenizer,
        version or data.get("chat_template", "glm5"),
        enable_thinking=data.get("enable_thinking", True),
    )


def _report(done: int, number: int) -> None:
    """Logs how many programs are compiled."""
    logging.info("Compiled program %d of %d.", done, number)


def _unusable(host: str, port: int, error: OSError) -> config.InputError:
    return config.InputError(
        f"--host={host} --port={port} cannot be used: {error}; give another --port, or "
        f"0 for any free one."
    )
