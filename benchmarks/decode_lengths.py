"""The requests that the benchmarks of decoding answer, ours and the peers' alike."""

PROMPT, NEW_TOKENS = 256, 128  # of each sequence of a batch
MIXED = [(16 + 16 * i % 240, 256 - 14 * i) for i in range(16)]  # prompt, new tokens
