"""Attention: GQA-8, MLA, MLA with Muon Split, MLA-256 with Muon Split (Table 1).

python -m glm5_jax.ablate --study=attention --scale=tiny

All attend to all keys. The released GLM-5 is MLA-256; MLA has half as many heads again,
of three quarters of the dims of queries and keys and half of those of values, as in the
paper's models: 96 heads of 192 and 128 against 64 of 256 and 256.
"""

import dataclasses

from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Claim, Study

_SPLIT = {"optim.muon_split": True}


def get_study(scale: str) -> Study:
    """Returns the four arms of Table 1, at one learning rate."""
    base = scales.pretrain(scale)
    model, layers = base.model, base.model.num_hidden_layers
    heads, rope = model.num_attention_heads, model.qk_rope_head_dim
    mla = {
        "model.num_attention_heads": heads * 3 // 2,
        "model.qk_nope_head_dim": model.qk_head_dim * 3 // 4 - rope,
        "model.v_head_dim": model.v_head_dim // 2,
        "optim.muon_split": False,
    }
    # A twelfth of the heads have keys and values, as 8 of GLM-4.5's 96; at least one.
    gqa = {
        "model.layer_types": ("grouped",) * layers,
        "model.num_attention_heads": heads * 3 // 2,
        "model.variants.num_key_value_heads": max(heads // 8, 1),
        "model.variants.head_dim": model.v_head_dim // 2,
        "optim.muon_split": False,
    }
    every = base.eval_every
    return Study(
        question="Which attention is best, and whose logits grow?",
        base=dataclasses.replace(
            base,
            checkpoint_every=every,
            checkpoints_keep_every=every,
            model=dataclasses.replace(model, attention="dense"),
        ),
        arms=(
            Arm(name="MLA", changes=mla),
            Arm(name="GQA-8", changes=gqa),
            Arm(name="MLA + Muon Split", changes=mla | _SPLIT),
            Arm(name="MLA-256 + Muon Split", changes=_SPLIT),
        ),
        metrics=(measures.held_out("arms"), measures.ATTENTION_LOGIT),
        measure=measures.Suites(
            names=("attention_logits",), length=base.data.sequence_length
        ),
        claims=(
            Claim(better="GQA-8", worse="MLA", source="Table 1"),
            Claim(better="MLA + Muon Split", worse="MLA", source="Table 1"),
            Claim(
                better="MLA + Muon Split",
                worse="MLA",
                source="GLM-5, 2.1",
                label=measures.ATTENTION_LOGIT.label,
            ),
        ),
        paper={
            "GQA-8": {"MMLU": "61.2", "BBH": "53.3"},
            "MLA": {"MMLU": "61.5", "BBH": "48.9"},
            "MLA + Muon Split": {"MMLU": "62.5", "BBH": "51.8"},
            "MLA-256 + Muon Split": {"MMLU": "62.0", "BBH": "51.3"},
        },
        paper_says="MLA falls behind GQA-8 with Muon on whole matrices, Muon Split "
        "closes the gap, and MLA-256 keeps it closed (GLM-5, Table 1).",
    )
