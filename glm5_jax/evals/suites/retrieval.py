"""The suites of needle.py: each retrieval task in short words and in RULER's."""

from glm5_jax.evals import record
from glm5_jax.evals.suites import needle

R = needle.Retrieval
_RULER = needle.RULER
_SHORT: dict[str, tuple[needle.Retrieval, str]] = {
    "needle": (R(), "One number among sentences of noise."),
    "needle_text": (
        R(haystack="text"),
        "One number among sentences of Python's language reference.",
    ),
    "needle_multikey": (R(num_keys=4), "The number of one of four keys."),
    "needle_crowd": (
        R(haystack="needles"),
        "The number of one key, where every other sentence gives another key's.",
    ),
    "needle_multivalue": (R(num_values=4), "All four numbers of one key."),
    "needle_multiquery": (R(num_keys=4, num_queries=4), "The numbers of four keys."),
}
_IN_RULERS_WORDS: dict[str, tuple[needle.Retrieval, str]] = {
    "niah_single_1": (R(wording=_RULER), "A number among RULER's noise."),
    "niah_single_2": (R(haystack="text", wording=_RULER), "A number in real text."),
    "niah_single_3": (
        R(haystack="text", value="uuid", wording=_RULER),
        "A UUID in real text.",
    ),
    "niah_multikey_1": (
        R(num_keys=4, haystack="text", wording=_RULER),
        "The number of one of four keys in real text.",
    ),
    "niah_multikey_2": (
        R(haystack="needles", wording=_RULER),
        "The number of one key among needles of others.",
    ),
    "niah_multikey_3": (
        R(haystack="needles", key="uuid", value="uuid", wording=_RULER),
        "The UUID of one UUID among needles of others.",
    ),
    "niah_multivalue": (
        R(num_values=4, haystack="text", wording=_RULER),
        "All four numbers of one key in real text.",
    ),
    "niah_multiquery": (
        R(num_keys=4, num_queries=4, haystack="text", wording=_RULER),
        "The numbers of four keys in real text.",
    ),
}
SUITES: tuple[record.Suite, ...] = (
    *(needle.suite(name, *given) for name, given in _SHORT.items()),
    *(needle.suite(f"ruler_{n}", *given) for n, given in _IN_RULERS_WORDS.items()),
)
