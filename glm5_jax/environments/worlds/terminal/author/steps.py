"""The three steps of one task: a model drafts it, it is built and proven, or refined.

A draft becomes a task folder (harbor/folder.py), which the world of such folders reads
and proves as any other. What fails is given back to the model.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Container, Sequence

from glm5_jax import config, messages
from glm5_jax.environments import endpoint, proofs, protocol
from glm5_jax.environments.harbor import world as harbor
from glm5_jax.environments.worlds.terminal import draft as draft_lib
from glm5_jax.environments.worlds.terminal import world as terminal
from glm5_jax.environments.worlds.terminal.author import answers

_AGENT_SECONDS = 60.0  # of a solution
_MOST_SHOWN = 2000  # characters of an output that a model reads
KEPT, NEVER, REPEATED = "kept", "never proven", "made before"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a topic.

    Attributes:
        outcome: KEPT or NEVER.
        failures: of each draft that was not kept, in their order; a refinement that
            the endpoint refused, such as one that is too long, is the last.
    """

    outcome: str
    failures: tuple[tuple[str, ...], ...]

    @property
    def num_requests(self) -> int:
        """Returns how often the model was asked."""
        return len(self.failures) + (self.outcome == KEPT)


async def make(
    ask: endpoint.Ask,
    topic: str,
    folder: pathlib.Path,
    known: set[str],
    num_refinements: int,
    num_repeats: int,
) -> Outcome:
    """Makes a task folder, if a draft or one of its refinements is proven.

    Args:
        ask: the model.
        topic: of the task.
        folder: to make.
        known: instructions of tasks that were kept; a new one is added.
        num_refinements: how often a draft may be mended.
        num_repeats: episodes of each solution.

    Raises:
        config.InputError: the endpoint does not answer, or refuses.
    """
    first = answers.first(topic)
    history: list[messages.Message] = first
    failures: list[tuple[str, ...]] = []
    for _ in range(1 + num_refinements):
        try:
            said = await ask(history, ())
        except endpoint.RefusedError as error:
            if not failures:  # of every request, perhaps
                raise
            failures.append((f"the endpoint refuses: {error}",))
            break
        problems, details = await _build(
            said["content"], topic, folder, known, num_repeats
        )
        if not problems:
            return Outcome(KEPT, tuple(failures))
        failures.append(tuple(problems))
        answer = {"role": "assistant", "content": said["content"]}
        history = [*first, answer, answers.refinement([*problems, *details])]
    return Outcome(NEVER, tuple(failures))


async def _build(
    text: str,
    topic: str,
    folder: pathlib.Path,
    known: set[str],
    num_repeats: int,
) -> tuple[Sequence[str], Sequence[str]]:
    """Builds and proves a draft; returns what fails, and what was seen of it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        draft = answers.read(text)
        problems, details = await _prove(
            draft, topic, partial, folder.name, known, num_repeats
        )
        if not problems:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
            partial.rename(folder)
            known.add(draft.instruction)
        return problems, details
    except (ValueError, OSError) as error:
        return [str(error)], ()
    finally:
        shutil.rmtree(partial, ignore_errors=True)


async def _prove(
    draft: draft_lib.Draft,
    topic: str,
    partial: pathlib.Path,
    name: str,
    known: Container[str],
    num_repeats: int,
) -> tuple[Sequence[str], Sequence[str]]:
    if draft.instruction in known:
        return [f"a task with this instruction was {REPEATED}; write another"], ()
    terminal.write(partial, name, topic, draft, _AGENT_SECONDS)
    try:
        world = harbor.Harbor(f"{harbor.PREFIX}{partial}")
    except config.InputError as error:
        return [str(error).replace(str(partial), "the task")], ()
    (read,) = world.by_id.values()
    task = world.task_of(read)
    proof = await proofs.prove(world, task, num_repeats)
    return proof.failures, await _seen(world, task) if proof.failures else ()


async def _seen(world: harbor.Harbor, task: protocol.Task) -> list[str]:
    """Returns what the solution and then the checks print."""
    played = world.environment()
    attempts = world.attempts(task)
    try:
        await played.reset(task)
        first = await played.step(attempts.right[0])
        last = await played.step(attempts.right[-1])
    except Exception as error:  # the setup failed, which the proof has told
        return [f"the task cannot be set up: {error}"[:_MOST_SHOWN]]
    finally:
        await played.close()
    printed = first.messages[0]["content"]
    found = [f"the solution prints: {printed[-_MOST_SHOWN:]}"]
    told = last.info.get("problem") or last.info.get("output", "")
    return [*found, f"the checks then print: {told[-_MOST_SHOWN:]}"]
