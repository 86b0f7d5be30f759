"""All suites by name."""

from collections.abc import Sequence

from glm5_jax import config as config_lib
from glm5_jax.config import fields
from glm5_jax.evals import record
from glm5_jax.evals.probes import attention, mtp, router
from glm5_jax.evals.suites import (
    bits_per_byte,
    code,
    counting,
    mrcr,
    multiple_choice,
    retrieval,
    sources,
    tracing,
)

_ALL = (
    bits_per_byte.SUITE,
    *retrieval.SUITES,
    *tracing.SUITES,
    *counting.SUITES,
    *sources.SUITES,
    *mrcr.SUITES,
    multiple_choice.SUITE,
    code.SUITE,
    attention.RECALL,
    attention.LOGITS,
    mtp.SUITE,
    router.SUITE,
)
SUITES: dict[str, record.Suite] = {suite.name: suite for suite in _ALL}
GROUPS: dict[str, tuple[str, ...]] = {
    "needles": tuple(n for n in SUITES if n.startswith("needle")),
    "probes": ("recall", "attention_logits", "mtp", "router"),
    "ruler": tuple(n for n in SUITES if n.startswith("ruler_")),
}


def find(names: Sequence[str]) -> list[record.Suite]:
    """Returns the suites of some names; a group stands for all of its suites.

    Raises:
      InputError: there is no suite of that name.
    """
    known = [*SUITES, *GROUPS]
    for name in names:
        if name not in known:
            guess = fields.did_you_mean(name, known)
            raise config_lib.InputError(
                f"There is no suite {name!r}.{guess} Choose among {', '.join(known)}."
            )
    chosen = [one for name in names for one in GROUPS.get(name, (name,))]
    return [SUITES[name] for name in dict.fromkeys(chosen)]
