"""Lets uvicorn's servers of this process end at once, once it is imported.

uvicorn looks every 0.1 s whether a server shall end and whether its connections have:
0.3 s for each server of a test. Nothing here bounds how long an answer may take.
"""

import asyncio
from typing import Any

from uvicorn import server

SECONDS = 0.005


class _Asyncio:
    """The module as uvicorn's server sees it: it sleeps for less long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, SECONDS))


server.asyncio = _Asyncio()
