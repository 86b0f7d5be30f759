"""The released models, and a ladder of small ones with the same proportions.

What the ladder keeps of GLM-5: heads * v_head_dim = 8/3 hidden, q_lora_rank = hidden
/ 3, intermediate = 2 hidden, an expert and kv_lora_rank in proportion, a quarter of a
head rotated, half as many indexer heads as attention heads, one dense layer in front
of the experts' ones, half of a typical sequence selected.
"""

import dataclasses

from glm5_jax import config as config_lib

GLM5 = config_lib.ModelConfig()  # 753,864,139,008 parameters with MTP
GLM5_2 = dataclasses.replace(
    GLM5,
    rope_theta=8e6,
    max_position_embeddings=1048576,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    index_share_for_mtp_iteration=True,
    mtp_num_steps=7,
)
# MLA in DeepSeek-V3's dims, the paper's MLA-192 (2.1): GLM5's MLA-256 has a third fewer
# heads, each wider.
GLM5_MLA192 = dataclasses.replace(
    GLM5, num_attention_heads=96, qk_nope_head_dim=128, v_head_dim=128
)


def small(hidden: int, layers: int, experts: int, vocab: int) -> config_lib.ModelConfig:
    """A model with GLM-5's proportions.

    Args:
      hidden: hidden_size, a multiple of 48.
      layers: decoder layers, the first one dense.
      experts: routed experts, of which each token takes an eighth, at least 2.
      vocab: vocab_size.
    """
    heads = max(hidden // 24, 2)
    return config_lib.ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 3,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=heads,
        q_lora_rank=hidden // 3,
        kv_lora_rank=hidden // 6,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        n_routed_experts=experts,
        num_experts_per_tok=max(experts // 8, 2),
        index_n_heads=max(heads // 2, 2),
        index_head_dim=32,
        index_topk=64,
        rope_theta=1e4,
        max_position_embeddings=4096,
        eos_token_id=(0,),
        pad_token_id=0,
        dtype="float32",
        remat_policy="dots",
    )


GLM5_1M = small(hidden=96, layers=4, experts=8, vocab=2048)
GLM5_10M = small(hidden=240, layers=5, experts=16, vocab=4096)
GLM5_100M = small(hidden=480, layers=8, experts=32, vocab=16384)
GLM5_1B = small(hidden=1008, layers=14, experts=64, vocab=32768)

# 0.6 M parameters on the 292 ids of "byte_chat", for tasks of a few dozen tokens.
BYTES = dataclasses.replace(
    small(hidden=96, layers=3, experts=8, vocab=320),
    index_topk=16,
    initializer_range=0.1,  # 0.02 is for wide models
    mtp_num_steps=1,
)

# 7.0 M parameters; the shape on which peers were timed.
BENCH = config_lib.ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=8,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=48,
    n_routed_experts=16,
    num_experts_per_tok=4,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=64,
    rope_theta=1e4,
    max_position_embeddings=4096,
    eos_token_id=(0,),
    pad_token_id=0,
    dtype="float32",
    remat_policy="dots",
)
MODELS = {
    "glm5": GLM5,
    "glm5_2": GLM5_2,
    "glm5_mla192": GLM5_MLA192,
    "glm5_1m": GLM5_1M,
    "glm5_10m": GLM5_10M,
    "glm5_100m": GLM5_100M,
    "glm5_1b": GLM5_1B,
}
