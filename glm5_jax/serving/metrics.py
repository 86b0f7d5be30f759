"""Figures of the server in the text form of Prometheus."""

from collections.abc import Iterator

from glm5_jax.http_server import guard
from glm5_jax.inference import drafter
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import fetching, prefill, served

_GAUGES = {
    "requests_running": ("running", "Requests that the engine works on."),
    "requests_waiting": ("waiting", "Requests that wait for a slot."),
    "slots_free": ("free_slots", "Slots without a request."),
    "pages_free": ("free_pages", "Pages of the cache that no request uses."),
    "weights_version": ("version", "Version of the weights."),
    "paused": ("is_paused", "1 while the engine is paused."),
}
_COUNTERS = {
    "prompt_tokens_total": ("prompt_tokens", "Tokens of prompts that were read."),
    "cached_tokens_total": ("cached_tokens", "Tokens of prompts found in the cache."),
    "generated_tokens_total": ("drawn_tokens", "Tokens that were drawn."),
    "dispatches_total": ("dispatches", "Steps of the engine."),
    "dispatch_seconds_total": ("dispatch_seconds", "Seconds in steps of the engine."),
    "dispatch_failures_total": ("failures", "Steps that raised an error."),
    "pages_restored_total": ("restored", "Pages that came back from host memory."),
    "preemptions_total": ("preemptions", "Requests that lost their pages for a while."),
}


def render(model: served.Served, door: guard.Guard, prefills: prefill.Prefills) -> str:
    """Returns all figures."""
    found = [*_lines(model.service.stats(), door), *_sent(prefills)]
    if model.fetcher is not None:
        found += _fetched(model.fetcher)
    return "".join(found)


def _lines(stats: service_lib.Stats, door: guard.Guard) -> Iterator[str]:
    for kind, names in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, (field, text) in names.items():
            yield _head(name, kind, text)
            number = getattr(stats, field)  # a bool counts as an int
            is_int = isinstance(number, int)
            shown = f"{number:d}" if is_int else repr(float(number))
            yield f"glm5_jax_{name} {shown}\n"
    yield _head("requests_ended_total", "counter", "Requests that ended, by reason.")
    for reason, number in sorted(stats.ended.items()):
        yield f'glm5_jax_requests_ended_total{{reason="{reason}"}} {number}\n'
    yield from _drafts(stats.acceptance)
    yield _head("http_requests_active", "gauge", "HTTP requests being answered.")
    yield f"glm5_jax_http_requests_active {door.num_active}\n"
    yield _head(
        "http_requests_refused_total", "counter", "HTTP requests beyond limits."
    )
    yield f"glm5_jax_http_requests_refused_total {door.num_refused}\n"


def _sent(prefills: prefill.Prefills) -> Iterator[str]:
    """Yields the figures of prompts that were read for other servers."""
    for name, kind, text, number in (
        ("pages_sent_total", "counter", "Pages for other servers.", prefills.num_pages),
        ("page_bytes_sent_total", "counter", "Their bytes.", prefills.num_bytes),
        ("page_bytes_held", "gauge", "Bytes not taken yet.", prefills.num_held),
    ):
        yield f"{_head(name, kind, text)}glm5_jax_{name} {number}\n"


def _fetched(fetcher: fetching.Fetcher) -> Iterator[str]:
    """Yields the figures of prompts that other servers were to read."""
    for name, text, number in (
        ("pages_fetched_total", "Pages of other servers.", fetcher.num_pages),
        ("page_bytes_fetched_total", "Their bytes.", fetcher.num_bytes),
    ):
        yield f"{_head(name, 'counter', text)}glm5_jax_{name} {number}\n"
    text = "Prompts for other servers; only those that were fetched were not read here."
    yield _head("prefills_total", "counter", text)
    for outcome in fetching.OUTCOMES:
        number = fetcher.outcomes[outcome]
        yield f'glm5_jax_prefills_total{{outcome="{outcome}"}} {number}\n'


def _drafts(acceptance: drafter.Acceptance) -> Iterator[str]:
    """Yields the figures of speculative decoding; positions count from 0, as vLLM's."""
    yield _head("drafts_per_round", "gauge", "Tokens that a round drafts, at present.")
    yield f"glm5_jax_drafts_per_round {acceptance.num_drafts}\n"
    yield _head("draft_acceptance_low", "gauge", "1 if few first drafts are kept.")
    yield f"glm5_jax_draft_acceptance_low {int(acceptance.is_low)}\n"
    yield _head("draft_rounds_total", "counter", "Rounds of sequences with drafts.")
    yield f"glm5_jax_draft_rounds_total {acceptance.rounds}\n"
    for name, numbers, text in (
        ("drafts_judged_total", acceptance.judged, "Drafted tokens, by position."),
        ("drafts_accepted_total", acceptance.accepted, "Those that were kept."),
    ):
        yield _head(name, "counter", text)
        for position, number in enumerate(numbers):
            yield f'glm5_jax_{name}{{position="{position}"}} {number}\n'


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP glm5_jax_{name} {text}\n# TYPE glm5_jax_{name} {kind}\n"
