"""Pre-training and mid-training: next tokens of texts, all parameters.

Mid-training is the same stage on other data: data.mixture with mixture_steps, a longer
data.sequence_length and init_from (arXiv 2602.15763, section 2.3).
"""

from glm5_jax.config.stages import record

STAGE = record.Stage(
    name="pretrain", losses=("next_token", "mtp", "balance", "indexer_kl")
)
