"""IndexShare: how many layers may reuse the keys that an earlier one has selected?

python -m glm5_jax.ablate --study=indexshare --scale=tiny
"""

import dataclasses

from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Claim, Study


def get_study(scale: str) -> Study:
    """Returns an indexer in every layer, in every second and in every fourth one."""
    base = scales.pretrain(scale)
    layers = max(base.model.num_hidden_layers, 4)
    model = dataclasses.replace(
        base.model,
        num_hidden_layers=layers,
        index_skip_topk_offset=1,
        index_topk=base.data.sequence_length // 8,
    )
    arms = [
        Arm(name=f"one indexer for {n}", changes={"model.index_topk_freq": n}, x=n)
        for n in (2, 4)
    ]
    return Study(
        question="How many layers may share one indexer?",
        base=dataclasses.replace(base, model=model),
        arms=(Arm(name="one indexer for 1", x=1), *arms),
        metrics=(
            measures.held_out("arms"),
            measures.SPEED,
        ),
        x_label="layers that share an indexer",
        claims=(
            Claim(
                better="one indexer for 4",
                worse="one indexer for 1",
                source="arXiv 2603.12201, prefill",
                label="speed",
            ),
        ),
        paper_says="trained with one indexer for 4 layers, a model of 30B keeps 49.9 "
        "of 50.2 points on long contexts, with one for 8 it falls to 46.1 (IndexShare, "
        "arXiv 2603.12201).",
    )
