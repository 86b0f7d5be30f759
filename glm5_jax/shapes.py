"""The letters of dims, in array types, einsum strings, suffixes and parameters.

A parameter's dims are a tuple of these letters. The tuple decides how the parameter is
sharded (glm5_jax/sharding.py) and how Muon cuts it into matrices
(glm5_jax/optim/dimension_numbers.py). A shard of a dim has the letter of the whole. A
dim without a letter is a word: "pages", or "row" for the C+R numbers that MLA caches of
a token (on a TPU with padding to whole tiles). pallas_kernels uses the same letters.

Einsum strings write the capital letters in lower case: "btnp,cnp->btnc" multiplies
[B, T, N, P] by [C, N, P]. In array types a lower-case letter is a dim of its own, and
*n are any leading dims.
"""

ALPHABET = {
    "B": "batch (rows of packed documents)",
    "T": "query tokens",
    "S": "key tokens",
    "D": "model: hidden_size",
    "F": "width of a feed-forward layer or of one expert",
    "V": "vocabulary",
    "L": "layers, stacked for a scan",
    "N": "attention heads",
    "H": "query and key head dim = P + R",
    "P": "its part without RoPE",
    "R": "its part with RoPE",
    "O": "value head dim",
    "Q": "query latent: q_lora_rank",
    "C": "key/value latent: kv_lora_rank",
    "I": "indexer heads",
    "J": "indexer head dim",
    "K": "keys that a query selects, or experts that a token chooses",
    "W": "32-bit words of a selection in bits",
    "E": "experts",
    "M": "rows sent to experts",
    "C+R": "what MLA caches of a token: latent, then rotated key",
    "D+D": "input of the MTP projection: embedding, then hidden state",
}
# Dims of reinforcement learning, and of attention variants that GLM-5 does not have.
ALPHABET |= {
    "G": "rollouts of one prompt",
    "A": "head dim of grouped-query attention",
    "U": "its key and value heads; as a parameter's dim they are N",
    "H+H+O": "channels of a convolution: query, key and value",
    "taps": "tokens that a convolution sums",
}
# Letters of array types alone.
ALPHABET |= {
    "b": "those of the B sequences that a call works on",
    "d": "D, as a device stores it",
    "k": "steps of multi-token prediction",
    "n": "a number that the text beside it explains; *n: any leading dims",
    "r": "pairs of dims that RoPE rotates: R / 2",
    "s": "keys of a page, or keys with padding to whole tiles",
    "t": "tokens of all rows in one dim, or queries with padding to whole tiles",
    "v": "V, as a device stores it",
}
