"""Plays whole episodes with given turns."""

import asyncio
import dataclasses


def play(taskset, task, *turns):
    """Returns the step results of the turns, each a message or its content."""

    async def episode():
        environment = taskset.environment()
        try:
            assert await environment.reset(task) == task.messages
            return [await environment.step(as_message(turn)) for turn in turns]
        finally:
            await environment.close()

    return asyncio.run(episode())


def hurry(box, seconds):
    """Gives a box's commands so long from now on; to start it took what it needed."""
    box._limits = dataclasses.replace(box._limits, seconds=seconds)


def as_message(turn):
    if not isinstance(turn, str):
        return turn
    return {"role": "assistant", "content": turn}


def demonstrated(taskset, task):
    """Returns the assistant's turns of the demonstration."""
    turns = taskset.demonstration(task)
    return [message for message in turns if message["role"] == "assistant"]
