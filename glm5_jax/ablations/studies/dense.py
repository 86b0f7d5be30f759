"""GLM-5's shape against a dense transformer in nanochat's proportions.

python -m glm5_jax.ablate --study=dense --scale=tiny

The dense model has grouped-query attention with as many key as query heads, all dims
rotated, feed-forward layers of four times the width, no experts and no indexer. Its
steps are chosen for equal FLOPs, by count, or for equal seconds, by the speed below.
"""

import dataclasses

from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Study

# Tokens per CPU second of the dense model over those of GLM-5's, by this study at equal
# steps (docs/ablations_results.md); other scales were not timed and lack the arm.
_SPEED = {"tiny": 1.9}


def get_study(scale: str) -> Study:
    """Returns GLM-5's shape and the dense one at equal steps, FLOPs and seconds."""
    from glm5_jax.training.reporting import accounting  # jax: after scale is checked

    base = scales.pretrain(scale)
    model, length = base.model, base.data.sequence_length
    layers, heads = model.num_hidden_layers, max(model.hidden_size // 80, 3)
    head = model.hidden_size // heads
    dense = {
        "model.layer_types": ("grouped",) * layers,
        "model.first_k_dense_replace": layers,
        "model.num_nextn_predict_layers": 0,
        "model.intermediate_size": 8 * model.hidden_size // 3,  # SwiGLU: 4 x 2 / 3
        "model.num_attention_heads": heads,
        "model.variants.num_key_value_heads": heads,
        "model.qk_rope_head_dim": head,
        "model.index_head_dim": head,
        "model.variants.head_dim": head,
    }
    study = Study(
        question="What does GLM-5's architecture buy at small size, and cost?",
        base=base,
        arms=(Arm(name="GLM-5"), Arm(name="dense, equal steps", changes=dense)),
        metrics=(measures.held_out("curve"), measures.SPEED),
        paper_says="GLM-5 prints no such comparison.",
    )
    other = study.config(study.arms[1], {}, ()).model
    ratio = accounting.flops_per_token(model, length) / accounting.flops_per_token(
        other, length
    )
    steps = {"FLOPs": ratio}
    if scale in _SPEED:
        steps["seconds"] = _SPEED[scale]
    arms = [
        Arm(
            name=f"dense, equal {name}",
            changes=dense | {"num_steps": round(base.num_steps * factor)},
        )
        for name, factor in steps.items()
    ]
    return dataclasses.replace(study, arms=(*study.arms, *arms))
