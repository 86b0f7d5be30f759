"""The flags of a server's engine: its room for sequences, and when it compiles."""

from absl import flags

NUM_SLOTS = flags.DEFINE_integer("num_slots", 8, "Sequences decoded at once.", 1)
NUM_PAGES = flags.DEFINE_integer("num_pages", 0, "Pages of 64 tokens to share.")
NUM_DRAFTS = flags.DEFINE_integer("num_drafts", 0, "Most tokens to draft; 0: none.")
ACCEPTANCE = flags.DEFINE_enum(
    "acceptance",
    "same_noise",
    ["same_noise", "rejection"],
    "How drafts are accepted: same_noise draws what is drawn without drafts; rejection "
    "keeps some more, and draws other tokens of the same distribution.",
)
HOST_PAGES = flags.DEFINE_integer("host_pages", 0, "Pages in host memory.")
CAPACITY = flags.DEFINE_integer(
    "capacity", 0, "Most tokens of prompt and answer; 0: as in training, or 4,096."
)
WARM_UP = flags.DEFINE_bool(
    "warm_up", False, "Compiles for every length of prompts before the port opens."
)
