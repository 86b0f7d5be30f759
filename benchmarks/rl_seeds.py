"""SFT and then RL of a small recipe, over seeds of both: does it always get there?

    python benchmarks/rl_seeds.py --task=reverse --seeds=0,1,2,3,4 \
        --workdir=runs/seeds --out=docs/rl_reverse.png
    python benchmarks/rl_seeds.py --stage=async --task=reverse --workdir=runs/seeds

Seed i of RL starts from seed i of SFT, so that data order, initial values and rollouts
all differ. Runs that are done are not repeated, those that were stopped resume: typed
again, the command resumes. --report_only draws what is there. Prints a Markdown table:
CPU seconds are those of the processes, compiling included, and do not grow with what
else the machine does; they are of all starts of a run.
"""

import argparse
import pathlib
import resource
import subprocess
import sys

import rl_curves

ROOT = pathlib.Path(__file__).parent.parent
COLUMNS = (
    *("seed", "SFT steps", "SFT, CPU s", "start", "RL steps", "RL, CPU s"),
    *("held-out success", "95% interval", f"first step > {rl_curves.SOLVED:.0%}"),
)


def main() -> None:
    """Runs the missing seeds, draws the picture and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="reverse", help="of configs/small_sft_TASK")
    parser.add_argument("--stage", choices=("rl", "async"), default="rl")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, help="the picture to write")
    parser.add_argument("--report_only", action="store_true")
    parser.add_argument("overrides", nargs="*", help="--config.rl.x=v, of RL, after --")
    args = parser.parse_args()
    workdir, seeds = args.workdir.resolve(), args.seeds.split(",")
    for seed in [] if args.report_only else seeds:
        sft, rl = folders(workdir, args, seed)
        train(f"small_sft_{args.task}", sft, f"--config.seed={seed}")
        train(
            f"small_{args.stage}_{args.task}",
            rl,
            f"--config.seed={seed}",
            f"--config.init_from={sft}",
            f"--config.data.tokenizer={sft}/tokenizer.json",
            *args.overrides,
        )
    pairs = {seed: folders(workdir, args, seed) for seed in seeds}
    done = [s for s, (_, rl) in pairs.items() if (rl / "summary.json").exists()]
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    lines += [row(seed, *pairs[seed]) for seed in done]
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))
    if args.out and done:
        runs = [rl_curves.read(str(pairs[seed][1])) for seed in done]
        rl_curves.draw({args.task: runs}).savefig(args.out, dpi=130)


def train(config: str, workdir: pathlib.Path, *changes: str) -> None:
    """Runs, or resumes, one stage; adds its CPU seconds to WORKDIR/cpu_seconds."""
    if (workdir / "summary.json").exists():
        return
    before = _cpu_seconds()
    command = [sys.executable, "-m", "glm5_jax.train", f"--config=configs/{config}.py"]
    done = subprocess.run(
        [*command, f"--workdir={workdir}", *changes], cwd=ROOT, check=False
    )
    if workdir.is_dir():
        with (workdir / "cpu_seconds").open("a") as file:
            file.write(f"{_cpu_seconds() - before:.1f}\n")
    if done.returncode:
        sys.exit(f"{workdir} ended with {done.returncode}; see above.")


def folders(
    workdir: pathlib.Path, args: argparse.Namespace, seed: str
) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the folders of a seed's SFT and of its RL."""
    sft, rl = (f"{args.task}_{stage}_{seed}" for stage in ("sft", args.stage))
    return workdir / sft, workdir / rl


def row(seed: str, sft: pathlib.Path, rl: pathlib.Path) -> list[str]:
    """Returns a seed's row of the table."""
    taught, learned = rl_curves.read(str(sft)), rl_curves.read(str(rl))
    start, end = taught[-1], learned[-1]
    first = rl_curves.first_solved(learned)
    return [
        seed,
        str(start["step"]),
        _total(sft / "cpu_seconds"),
        f"{start['eval/success']:.0%}",
        str(end["step"]),
        _total(rl / "cpu_seconds"),
        f"{end['eval/success']:.1%}",
        f"{end['eval/success_low']:.1%} to {end['eval/success_high']:.1%}",
        "never" if first is None else f"{first:.0f}",
    ]


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _total(path: pathlib.Path) -> str:
    return f"{sum(map(float, path.read_text().split())):.0f}"


if __name__ == "__main__":
    main()
