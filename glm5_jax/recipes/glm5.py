"""The stages of GLM-5 up to reasoning RL, at sizes that a CPU trains.

Pre-training, mid-training at two lengths with another base of RoPE, DSA warm-up, sparse
adaptation, supervised fine-tuning, RL (arXiv 2602.15763, sections 2 and 3). Stages that
read long texts have dense attention until the warm-up; from the adaptation on the
indexer selects at most an eighth of the longest row's keys.
"""

import dataclasses
import pathlib

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.recipes import documents, record

_CHAT = "byte_chat"  # bytes and GLM-5's special tokens, in every stage
_TASK = "reverse:3-6"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """All in which two recipes of these stages differ."""

    model: config_lib.ModelConfig
    lengths: tuple[int, int, int]  # of pre-training, and of both mid-trainings
    num_documents: int  # of the first length, made; half as many at each next one
    tokens_per_step: int
    steps: tuple[int, ...]  # of each stage
    minutes: tuple[float, ...]  # of each stage, expected on two idle cores
    rl_rows: tuple[int, int]  # tasks of a step, answers to a task
    eval_tasks: int  # held-out tasks of an evaluation
    num_needles: int  # tasks of retrieval at each length, after a stage
    num_recall_rows: int  # rows of text in which the selection is compared
    sample_tokens: int  # length of the sample of a stage that reads texts
    sft_stop: float  # success that ends SFT; 0: never
    cache_dir: str = config_lib.DataConfig().cache_dir
    rope_theta: float = 1e5  # of mid-training and later stages
    text_source: str = "python"  # of the text: as data.source
    # Share of the text; the rest is documents that ask for retrieval.
    text_weight: float = 0.3


def recipe(name: str, description: str, sizes: Sizes) -> record.Recipe:
    """Returns the stages in their order, at the given sizes."""
    first, second, third = sizes.lengths
    num, rows = sizes.num_needles, sizes.num_recall_rows
    recall = record.Measure(suites=("recall",), lengths=(third,), num_tasks=rows)

    def needles(*lengths: int) -> record.Measure:
        return record.Measure(suites=("needle",), lengths=lengths, num_tasks=num)

    measures = {
        "pretraining": (needles(first, second),),
        f"mid_training_{second}": (needles(second, third),),
        f"mid_training_{third}": (needles(third), recall),
        "dsa_warmup": (recall,),
        "sparse_adaptation": (needles(third), recall),
    }
    longer = dataclasses.replace(sizes.model, rope_theta=sizes.rope_theta)
    sparse = dataclasses.replace(longer, attention="sparse")
    warm = dataclasses.replace(longer, attention="dense_with_indexer_loss")
    switch = ("rope_theta",)
    configs = {
        "pretraining": _text(sizes, 0, first, sizes.model, 1e-2, 2e-3),
        f"mid_training_{second}": dataclasses.replace(
            _text(sizes, 1, second, longer, 4e-3, 2e-3), init_from_changes=switch
        ),
        f"mid_training_{third}": _text(sizes, 2, third, longer, 3e-3, 1e-3),
        "dsa_warmup": _text(sizes, 3, third, warm, 1e-2, 1e-3, stage="dsa_warmup"),
        "sparse_adaptation": _text(
            sizes, 4, third, sparse, 2e-3, 3e-4, stage="dsa_sparse"
        ),
        "sft": _sft(sizes, 5, sparse),
        "rl": _rl(sizes, 6, sparse),
    }
    stages = tuple(
        record.Stage(
            name=stage,
            train=config,
            minutes=minutes,
            measures=measures.get(stage, ()),
        )
        for (stage, config), minutes in zip(configs.items(), sizes.minutes, strict=True)
    )
    return record.Recipe(
        name=name,
        description=description,
        corpora=tuple(c for n in sizes.lengths for c in _corpora(sizes, n)),
        stages=stages,
        claims=_claims(sizes.lengths, *(stage.name for stage in stages)),
    )


def _claims(
    lengths: tuple[int, int, int],
    pretraining: str,
    mid: str,
    longest: str,
    warmup: str,
    sparse: str,
    sft: str,
    rl: str,
) -> tuple[record.Claim, ...]:
    """Returns what the stages should show."""
    _, second, third = lengths
    return (
        record.Claim(
            text=f"mid-training raises needle accuracy at {second} tokens",
            figure=f"needle/{second}",
            before=pretraining,
            after=mid,
            relation="rises",
        ),
        record.Claim(
            text=f"mid-training raises needle accuracy at {third} tokens",
            figure=f"needle/{third}",
            before=mid,
            after=longest,
            relation="rises",
        ),
        record.Claim(
            text="the warm-up raises the share of attention that the selection keeps",
            figure=f"recall/{third}",
            before=longest,
            after=warmup,
            relation="rises",
        ),
        record.Claim(
            text="sparse attention finds as many needles as dense attention",
            figure=f"needle/{third}",
            before=longest,
            after=sparse,
            relation="is no lower than",
            tolerance=0.02,
        ),
        record.Claim(
            text="sparse attention ends within 1% of the dense model's bits per byte",
            figure="eval/bits_per_byte",
            before=longest,
            after=sparse,
            relation="is no higher than",
            tolerance=0.01,
        ),
        record.Claim(
            text="RL solves more held-out tasks than SFT",
            figure="eval/success",
            before=sft,
            after=rl,
            relation="rises",
        ),
    )


def _corpora(sizes: Sizes, length: int) -> tuple[record.Corpus, record.Corpus]:
    """Returns texts, and documents that ask for retrieval, in rows of one length."""
    settings = config_lib.PrepareConfig(
        source=sizes.text_source,
        tokenizer=_CHAT,
        sequence_length=length,
        packing="best_fit",
        held_out_percent=10,
    )
    count = sizes.num_documents * sizes.lengths[0] // length
    weights = (1.0, 2.0, 3.0)
    return (
        record.Corpus(name=f"text_{length}", prepare=settings),
        record.Corpus(
            name=f"retrieval_{length}",
            prepare=settings,
            documents=documents.maker(length, count, weights),
        ),
    )


def _text(
    sizes: Sizes,
    number: int,
    length: int,
    model: config_lib.ModelConfig,
    first_rate: float,
    last_rate: float,
    stage: str = "pretrain",
) -> config_lib.TrainConfig:
    """Returns the config of a stage that reads texts of one length."""
    steps = sizes.steps[number]
    return config_lib.TrainConfig(
        stage=stage,
        num_steps=steps,
        eval_every=max(steps // 4, 1),
        eval_batches=4,
        checkpoint_every=max(steps // 4, 1),
        sample_prompt="The code of lamo is 482. Here we go. ? The code of lamo is ",
        sample_tokens=sizes.sample_tokens,
        model=model,
        data=config_lib.DataConfig(
            mixture=(f"text_{length}", f"retrieval_{length}"),
            mixture_weights=((sizes.text_weight, round(1 - sizes.text_weight, 6)),),
            tokenizer=_CHAT,
            sequence_length=length,
            batch_size=sizes.tokens_per_step // length,
            cache_dir=sizes.cache_dir,
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            learning_rate=first_rate,
            end_learning_rate=last_rate,
            warmup_steps=max(steps // 50, 1),
            ns_dtype="float32",
        ),
    )


def _sft(
    sizes: Sizes, number: int, model: config_lib.ModelConfig
) -> config_lib.TrainConfig:
    """Returns the config of fine-tuning on answers to a task."""
    steps, length = sizes.steps[number], sizes.lengths[0]
    return config_lib.TrainConfig(
        stage="sft",
        num_steps=steps,
        eval_every=max(steps // 60, 1),
        eval_batches=1,
        checkpoint_every=max(steps // 4, 1),
        eval_success=True,
        stop_metric="eval/success" if sizes.sft_stop else "",
        stop_at=sizes.sft_stop,
        sample_prompt="reverse glm",
        sample_tokens=12,
        model=model,
        data=config_lib.DataConfig(
            source=f"tasks:{_TASK}",
            tokenizer=_CHAT,
            enable_thinking=False,
            sequence_length=length,
            batch_size=max(sizes.tokens_per_step // length // 2, 1),
            cache_dir=sizes.cache_dir,
        ),
        loss=config_lib.LossConfig(indexer_weight=0.1, router_bias_rate=0.01),
        optim=config_lib.OptimConfig(
            name="adamw", learning_rate=2e-3, schedule="constant", warmup_steps=1
        ),
        rl=_episodes(sizes),
    )


def _rl(
    sizes: Sizes, number: int, model: config_lib.ModelConfig
) -> config_lib.TrainConfig:
    """Returns the config of RL on the same task, from the reward alone."""
    steps = sizes.steps[number]
    return config_lib.TrainConfig(
        stage="rl",
        num_steps=steps,
        eval_every=max(steps // 8, 1),
        checkpoint_every=max(steps // 4, 1),
        model=model,
        data=config_lib.DataConfig(
            tokenizer=_CHAT, enable_thinking=False, sequence_length=32
        ),
        optim=config_lib.OptimConfig(
            name="adamw",
            learning_rate=8e-4,
            end_learning_rate=1e-4,
            schedule="linear",
            warmup_steps=max(steps // 30, 1),
            weight_decay=0.0,
            adam_b2=0.98,
            clip_norm=1.0,
        ),
        rl=_episodes(sizes),
    )


def _episodes(sizes: Sizes) -> config_lib.RLConfig:
    """Returns how tasks are played, in SFT's evaluations and in RL."""
    prompts, answers = sizes.rl_rows
    return config_lib.RLConfig(
        environment=_TASK,
        prompts_per_step=prompts,
        group_size=answers,
        max_new_tokens=8,
        max_turns=1,
        slots=min(prompts * answers, 128),
        dynamic_sampling=sizes.sft_stop > 0,
        min_start_success=0.05 * (sizes.sft_stop > 0),
        max_start_success=1.0,  # a lucky end of SFT must not end the pipeline
        min_used_groups=0.125 * (sizes.sft_stop > 0),
        num_eval_tasks=sizes.eval_tasks,
    )


_MODEL = dataclasses.replace(
    presets.small(hidden=96, layers=4, experts=8, vocab=320),
    attention="dense",
    index_topk=64,
    initializer_range=0.1,  # 0.02 is for wide models
    mtp_num_steps=1,
    remat_policy="none",
)
SMALL = recipe(
    "small",
    "All stages of GLM-5 up to reasoning RL, with a model of 0.7 million parameters, "
    "on two cores in less than half an hour.",
    Sizes(
        model=_MODEL,
        lengths=(128, 256, 512),
        num_documents=40_000,
        tokens_per_step=4096,
        steps=(1200, 250, 300, 120, 200, 300, 150),
        minutes=(8.2, 2.8, 3.5, 1.4, 4.0, 1.5, 2.3),
        rl_rows=(16, 8),
        eval_tasks=256,
        num_needles=100,
        num_recall_rows=32,
        sample_tokens=24,
        sft_stop=0.75,
    ),
)
TINY = recipe(
    "tiny",
    "The same stages with a few steps each, to see that everything runs.",
    Sizes(
        model=dataclasses.replace(
            presets.small(hidden=48, layers=1, experts=2, vocab=320),
            attention="dense",
            index_topk=4,
            num_nextn_predict_layers=0,
        ),
        lengths=(64, 80, 96),
        num_documents=100,
        tokens_per_step=192,
        steps=(2, 2, 2, 2, 2, 2, 2),
        minutes=(0.5,) * 7,
        rl_rows=(2, 2),
        eval_tasks=2,
        num_needles=2,
        num_recall_rows=2,
        text_source=str(pathlib.Path(config_lib.__file__).parent),
        sample_tokens=0,
        sft_stop=0.0,
    ),
)
