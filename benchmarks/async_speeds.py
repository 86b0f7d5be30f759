"""How an engine and a trainer of one process slow each other, for async_rl.py.

    python benchmarks/async_speeds.py --run=DIR/steady --out=DIR/speeds.json

Loads a run of stage rl that kept its episodes and ended with a checkpoint. A step
learns from these episodes, again and again, and an engine draws their turns: first each
alone, then both together. Steps leave pauses as long as themselves, as those of a run
do.
Prints one JSON line:

    step: seconds of a step beside the engine, over those alone
    draw: seconds of the engine's work while a step runs, over those alone
    step_seconds: of a step alone
    share_of_steps: share of the time together in which a step ran
    turns: tokens drawn in each turn of the run's episodes
"""

import argparse
import itertools
import json
import pathlib
import statistics
import time
from concurrent import futures

from glm5_jax import compile_cache
from glm5_jax.rl import gateway
from glm5_jax.training.run import host_memory

AT_ONCE = 4  # requests: few turns begin together where tools take their time
WARM_STEPS, STEPS = 5, 30
WARM_SECONDS, SECONDS = 2.0, 12.0


class Trainer:
    """Learns the last steps of a run again, in turn."""

    def __init__(self, workdir: pathlib.Path) -> None:
        """Loads the run's last checkpoint."""
        import jax

        from glm5_jax.checkpoint import manager, step_folder
        from glm5_jax.rl import episode_files
        from glm5_jax.training import program as program_lib
        from glm5_jax.training import replay
        from glm5_jax.training.run import state as run_lib

        self.config = replay.config_of(workdir)
        mesh = run_lib.make_mesh(self.config)
        jax.set_mesh(mesh)
        self._place = program_lib.batch_place(mesh)
        program = program_lib.make_program(self.config, mesh)
        folder = step_folder.absolute(workdir) / "checkpoints"
        last = max(step_folder.numbers(folder))
        shapes = {"params": program.params, "opt_state": program.opt_state}
        state = manager.read_state(folder / str(last), shapes)
        self.params, self._opt_state = state["params"], state["opt_state"]
        self._learn = program.compile(self.config.num_rows)
        numbers = episode_files.numbers(workdir)[-STEPS:]
        self.kept = [episode_files.read(workdir, number) for number in numbers]
        self._next = itertools.cycle(self.kept)

    def step(self) -> float:
        """Makes a step and returns its seconds."""
        import jax

        from glm5_jax.training.feeds import policy_batch

        began, kept = time.perf_counter(), next(self._next)
        groups = [[*group] for group in kept.groups]
        batch = policy_batch.make(self.config, groups, kept.position)
        placed = jax.device_put(batch, self._place)
        self.params, self._opt_state, metrics = self._learn(
            self.params, self._opt_state, placed
        )
        jax.block_until_ready((self.params, metrics))
        return time.perf_counter() - began


class Player:
    """Draws the turns of a run's episodes, with an engine like the run's."""

    def __init__(self, trainer: Trainer) -> None:
        """Makes an engine with a copy of the trainer's weights, and warms it up."""
        import jax

        from glm5_jax.inference import engine as engine_lib

        config = trainer.config
        self._engine = engine_lib.Engine(
            jax.tree.map(jax.numpy.copy, trainer.params),
            config.model,
            num_slots=config.rl.slots,
            capacity=config.data.sequence_length,
            chunk=config.rl.prefill_chunk,
            with_experts=config.replays_routing,
        )
        self._engine.warm_up()
        episodes = [e for kept in trainer.kept for group in kept.groups for e in group]
        self.turns = [turns(e.samples[0]) for e in episodes if e.samples]
        self._ids, self._first = itertools.count(), 0

    def play(self) -> None:
        """Draws the next few episodes, whose tools take no time."""
        from glm5_jax.inference import requests

        first, self._first = self._first, self._first + AT_ONCE
        chosen = [self.turns[(first + i) % len(self.turns)] for i in range(AT_ONCE)]
        for asked in itertools.zip_longest(*chosen):
            for prompt, count in filter(None, asked):
                self._engine.submit(requests.Request(next(self._ids), prompt, count))
            while self._engine.num_pending:
                self._engine.step()

    def play_for(self, seconds: float) -> tuple[int, float]:
        """Plays until the time is over; returns how often, and the seconds it took."""
        began, number = time.perf_counter(), 0
        while (taken := time.perf_counter() - began) < seconds:
            self.play()
            number += 1
        return number, taken


def turns(sample: gateway.Sample) -> list[tuple[list[int], int]]:
    """Returns each turn of a sample: its prompt, and how many tokens were drawn."""
    found, start = [], 0
    for is_drawn, run in itertools.groupby(map(bool, sample.mask)):
        end = start + len([*run])
        if is_drawn:
            found.append(([int(token) for token in sample.tokens[:start]], end - start))
        start = end
    return found


def together(
    trainer: Trainer, player: Player, thread: futures.Executor
) -> tuple[list[float], float, int, float]:
    """Lets both work.

    Returns:
      Seconds of each step; their sum within the time that the player played; how often
      it did; and that time.
    """
    playing = thread.submit(player.play_for, SECONDS)
    steps, within = [], 0.0
    while not playing.done():
        seconds = trainer.step()
        if not playing.done():
            steps.append(seconds)
            within += seconds
        time.sleep(seconds)
    return steps, within, *playing.result()


def measure(workdir: pathlib.Path) -> dict:
    """Returns the factors of the module's docstring, and what they are made of."""
    trainer = Trainer(workdir)
    # All of the engine's work is in one thread: another one would compile again.
    with futures.ThreadPoolExecutor(1) as thread:
        player = thread.submit(Player, trainer).result()
        for _ in range(WARM_STEPS):
            trainer.step()
        alone = statistics.median(trainer.step() for _ in range(STEPS))
        thread.submit(player.play_for, WARM_SECONDS).result()
        before = thread.submit(player.play_for, SECONDS / 2).result()
        steps, within, number, taken = together(trainer, player, thread)
        after = thread.submit(player.play_for, SECONDS / 2).result()
    play = (before[1] + after[1]) / (before[0] + after[0])
    # Of `taken` seconds, `within` were slowed; the work of `number` plays was done.
    done_beside = max(number * play - (taken - within), 0.05 * within)
    return {
        "step": max(statistics.mean(steps) / alone, 1.0),
        "draw": max(within / done_beside, 1.0),
        "step_seconds": alone,
        "share_of_steps": within / taken,
        "turns": [[count for _, count in episode] for episode in player.turns],
    }


def main() -> None:
    """Parses flags, measures and prints."""
    host_memory.restart_with_large_pages()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    compile_cache.enable()
    text = json.dumps(measure(args.run))
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
