"""Number of selected keys: what does reading fewer keys cost?

python -m glm5_jax.ablate --study=topk --scale=tiny
"""

import dataclasses

from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Claim, Study


def get_study(scale: str) -> Study:
    """Returns dense attention beside selections of 1/32 to 1/4 of a row's keys."""
    base = scales.pretrain(scale)
    length = base.data.sequence_length
    model = dataclasses.replace(base.model, attention="sparse")
    counts = [length // part for part in (4, 8, 16, 32)]
    arms = [Arm(name=f"{n} keys", changes={"model.index_topk": n}, x=n) for n in counts]
    return Study(
        question=f"How many of {length} keys must a query read?",
        base=dataclasses.replace(base, model=model),
        arms=(
            Arm(name="all keys", changes={"model.attention": "dense"}, x=length),
            *arms,
        ),
        metrics=(
            measures.held_out("arms"),
            measures.SPEED,
        ),
        x_label="keys that a query reads",
        claims=(
            Claim(better="all keys", worse=f"{counts[-1]} keys", source="expectation"),
        ),
        paper_says="GLM-5 selects 2,048 of up to 202,752 keys and reports that the "
        "sparse model loses nothing at 128K (Table 3); it prints no study of the "
        "number.",
    )
