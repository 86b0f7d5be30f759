"""The tools of an episode: search, open, find, python."""

import asyncio
import pathlib
from collections.abc import Mapping

from glm5_jax.environments import sandbox, tool_calls
from glm5_jax.environments.worlds.search import articles, index

_HITS = 10
_PAGE_CHARACTERS = 8000
_FOUND_LINES = 20
_LIMITS = sandbox.Limits(
    seconds=10.0, memory_bytes=2**29, num_processes=32, output_bytes=8 * 2**10
)


TOOLS = (
    tool_calls.schema("search", "Find articles by their words.", query="Words."),
    tool_calls.schema(
        "open", "Read an article; {names} are its links.", page="Its title."
    ),
    tool_calls.schema(
        "find", "Find lines of the opened article.", text="A part of them."
    ),
    tool_calls.schema("python", "Run a Python program; no network.", code="It."),
)


class Tools:
    """The tools of one episode, with the opened article and the sandbox."""

    def __init__(
        self,
        graph: articles.Graph,
        search: index.Index,
        hidden: tuple[pathlib.Path, ...] = (),
    ) -> None:
        """Begins with no article; a sandbox starts when Python is first called.

        Args:
            graph: of the articles.
            search: finds them.
            hidden: files and folders of this machine that the sandbox must not show.
        """
        self._graph, self._index = graph, search
        self._image = sandbox.Image(hidden=hidden)
        self._opened: articles.Article | None = None
        self._box: sandbox.Box | None = None

    async def run(self, name: str, arguments: Mapping[str, str]) -> str:
        """Returns the result of a checked call.

        Raises:
            tool_calls.CallError: no article has the title, or none is opened.
        """
        (text,) = arguments.values()
        if name == "python":
            return await self._python(text)
        if name == "search":
            return await asyncio.to_thread(self._search, text)
        return self._open(text) if name == "open" else self._find(text)

    async def close(self) -> None:
        """Ends the sandbox, if there is one."""
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    def _search(self, query: str) -> str:
        hits = self._index.search(query, _HITS)
        lines = [f"{self._graph.articles[h.number].title}: {h.snippet}" for h in hits]
        return "\n".join(lines) or "Nothing was found."

    def _open(self, page: str) -> str:
        number = self._graph.find(page)
        if number is None:
            hits = self._index.search(page, 3)
            near = [self._graph.articles[hit.number].title for hit in hits]
            told = f" Perhaps: {'; '.join(near)}." if near else ""
            raise tool_calls.CallError(f"there is no article of this title.{told}")
        self._opened = article = self._graph.articles[number]
        text, rest = article.text[:_PAGE_CHARACTERS], article.text[_PAGE_CHARACTERS:]
        more = "\n[cut: `find` searches the rest, too]" if rest else ""
        head = f"{'; '.join(article.names)}\nFiled under: {', '.join(article.tags)}"
        return f"{head}\n\n{text}{more}"

    def _find(self, text: str) -> str:
        if self._opened is None:
            raise tool_calls.CallError("open an article first.")
        lines = enumerate(self._opened.text.splitlines(), 1)
        wanted = articles.normalize(text)
        found = [f"{i}: {x}" for i, x in lines if wanted in articles.normalize(x)]
        more = [f"[{len(found) - _FOUND_LINES} more lines]"]
        shown = found[:_FOUND_LINES] + (more if len(found) > _FOUND_LINES else [])
        return "\n".join(shown) or "No line contains it."

    async def _python(self, code: str) -> str:
        if self._box is None:
            self._box = await sandbox.start(self._image, _LIMITS)
        try:
            await self._box.write("program.py", code.encode())
        except sandbox.FileError as error:  # of what earlier programs did
            raise tool_calls.CallError(str(error)) from error
        return (await self._box.run("python3 -I program.py")).text()
