"""The flags of reading prompts apart from decoding; imports neither jax nor more."""

from absl import flags

MIN_TOKENS = 256  # default of the flag
PREFILL_SERVERS = flags.DEFINE_list(
    "prefill_servers", [], "Addresses of servers that read long prompts for this one."
)
MIN_PREFILL_TOKENS = flags.DEFINE_integer(
    "min_prefill_tokens",
    MIN_TOKENS,
    "Prompts with fewer new tokens are read here, whatever --prefill_servers says.",
    lower_bound=1,
)
NUM_PREFILL_REPLICAS = flags.DEFINE_integer(
    "num_prefill_replicas",
    0,
    "Servers on this machine that read prompts for those of --num_replicas.",
    lower_bound=0,
)
