"""From vectors to scores of words, which may lie on several devices."""

from jaxtyping import Array, Float

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import transformer


def logits(
    params: dict, config: config_lib.ModelConfig, hidden: Float[Array, "B D"]
) -> Float[Array, "B V"]:
    """Whole logits of a device's rows, float32.

    Devices that share the words score each other's rows, each for the words that it
    has, and send back what they found: B V numbers to a device, however many share.
    """
    head = collectives.fetched(params["lm_head"], ("D", "V"), config.dtype)
    hidden = collectives.gather(hidden, collectives.WORD_ROWS, 0)
    scores = transformer.logits({"lm_head": head}, config, hidden)
    # The table of rules gives V to SHARES first: a share is a run of words.
    scores = collectives.exchange(scores, collectives.WORD_ROWS, split=0, joined=1)
    return collectives.gather(scores, collectives.SHARES, 1)
