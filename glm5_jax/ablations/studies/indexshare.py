"""IndexShare: how many layers may reuse the keys that an earlier one has selected?

python -m glm5_jax.ablate --study=indexshare --scale=tiny

Trained arms share indexers from the first step on. The others take the trained model
with all of its indexers, and drop some without training: those of every second layer,
or those that the greedy search finds to be missed least.
"""

import dataclasses

from glm5_jax.ablations import measures, scales, searches
from glm5_jax.ablations.study import Arm, Claim, Study

_ALL = "one indexer for 1"
_UNIFORM, _SEARCHED = "every second dropped, untrained", "half searched, untrained"


def _untrained(layers: int, length: int) -> tuple[Arm, ...]:
    """Returns the trained model with half of its indexers, chosen in two ways."""
    uniform = ("FS" * layers)[:layers]
    return (
        Arm(
            name=_UNIFORM,
            after=_ALL,
            is_trained=False,
            measured_with={"model.index_topk_pattern": uniform},
        ),
        Arm(
            name=_SEARCHED,
            after=_ALL,
            is_trained=False,
            search=searches.Indexers(num_indexers=uniform.count("F"), length=length),
        ),
    )


def get_study(scale: str) -> Study:
    """Returns indexers in each, half and a quarter of the layers, trained or not."""
    base = scales.pretrain(scale)
    length, layers = base.data.sequence_length, max(base.model.num_hidden_layers, 4)
    model = dataclasses.replace(
        base.model,
        num_hidden_layers=layers,
        index_skip_topk_offset=1,
        index_topk=length // 8,
    )
    trained = [
        Arm(name=f"one indexer for {n}", changes={"model.index_topk_freq": n})
        for n in (2, 4)
    ]
    return Study(
        question="How many layers may share one indexer?",
        base=dataclasses.replace(base, model=model),
        arms=(Arm(name=_ALL), *trained, *_untrained(layers, length)),
        metrics=(
            measures.BITS_PER_BYTE,
            measures.SPEED,
        ),
        measure=measures.Suites(names=measures.TEXT, length=length, num_tasks=64),
        claims=(
            Claim(
                better="one indexer for 4",
                worse=_ALL,
                source="arXiv 2603.12201, prefill",
                label="speed",
            ),
            Claim(better=_SEARCHED, worse=_UNIFORM, source="arXiv 2603.12201, greedy"),
        ),
        paper_says="trained with one indexer for 4 layers, a model of 30B keeps 49.9 "
        "of 50.2 points on long contexts, with one for 8 it falls to 46.1; without "
        "training, GLM-5 with the 40 of 78 indexers of a greedy search keeps 78.0 of "
        "78.4 points (IndexShare, arXiv 2603.12201).",
    )
