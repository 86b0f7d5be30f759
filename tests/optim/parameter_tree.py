"""A full parameter tree for the tests of the optimizer: dim names and shapes."""

from glm5_jax import depth

NORMS = {
    "input_layernorm": ("D",),
    "post_attention_layernorm": ("D",),
}
ATTENTION = {
    "q_a_proj": ("D", "Q"),
    "q_a_layernorm": ("Q",),
    "q_b_proj": ("Q", "N", "H"),
    "kv_a_proj": ("D", "C+R"),
    "kv_a_layernorm": ("C",),
    "k_b_proj": ("C", "N", "P"),
    "v_b_proj": ("C", "N", "O"),
    "o_proj": ("N", "O", "D"),
}
INDEXER = {
    "wq_b": ("Q", "I", "J"),
    "wk": ("D", "J"),
    "k_norm_scale": ("J",),
    "k_norm_bias": ("J",),
    "weights_proj": ("D", "I"),
}
SWIGLU = {"gate_proj": ("D", "F"), "up_proj": ("D", "F"), "down_proj": ("F", "D")}
EXPERTS = {
    "gate": ("D", "E"),
    "e_score_correction_bias": ("E",),
    "experts": {name: ("E", *names) for name, names in SWIGLU.items()},
    "shared_experts": SWIGLU,
}


def dim_names(model):
    """Returns the tree of logical dim names of a model."""
    tree = {"embed_tokens": ("V", "D"), "lm_head": ("D", "V"), "norm": ("D",)}
    for g, group in enumerate(depth.layer_groups(model)):
        blocks = {f"block_{p}": _block(kind) for p, kind in enumerate(group.unit)}
        tree[f"layers_{g}"] = map_names(lambda names: ("L", *names), blocks)
    mtp = {"enorm": ("D",), "hnorm": ("D",), "eh_proj": ("D+D", "D"), "norm": ("D",)}
    return tree | {"mtp": mtp | {"block": _block(depth.mtp_kind(model))}}


def shapes(model):
    """Returns the tree of shapes of a model."""
    sizes = {
        "V": model.vocab_size,
        "D": model.hidden_size,
        "D+D": 2 * model.hidden_size,
        "Q": model.q_lora_rank,
        "C": model.kv_lora_rank,
        "C+R": model.kv_lora_rank + model.qk_rope_head_dim,
        "N": model.num_attention_heads,
        "H": model.qk_head_dim,
        "P": model.qk_nope_head_dim,
        "O": model.v_head_dim,
        "I": model.index_n_heads,
        "J": model.index_head_dim,
        "E": model.n_routed_experts,
    }
    tree = dim_names(model)
    for g, group in enumerate(depth.layer_groups(model)):
        sizes["L"] = group.repeats
        for p, kind in enumerate(group.unit):
            sizes["F"] = model.intermediate_size
            if kind.has_experts:
                sizes["F"] = model.moe_intermediate_size
            block = tree[f"layers_{g}"][f"block_{p}"]
            tree[f"layers_{g}"][f"block_{p}"] = _shapes(block, dict(sizes))
    sizes["F"] = model.moe_intermediate_size
    rest = {k: v for k, v in tree.items() if not k.startswith("layers_")}
    return tree | _shapes(rest, sizes)


def map_names(function, tree):
    """Applies a function to every tuple of a nested dict."""
    if isinstance(tree, tuple):
        return function(tree)
    return {name: map_names(function, branch) for name, branch in tree.items()}


def _shapes(tree, sizes):
    return map_names(lambda names: tuple(sizes[name] for name in names), tree)


def _block(kind):
    mlp = SWIGLU if not kind.has_experts else EXPERTS
    indexer = {"indexer": INDEXER} if kind.owns_indexer else {}
    return NORMS | {"self_attn": ATTENTION, "mlp": mlp} | indexer
