"""A full-text index of articles: SQLite's FTS5, ranked by BM25."""

import dataclasses
import re
import sqlite3
import threading

from glm5_jax.environments.worlds.search import articles

_TITLE_WEIGHT = 4.0  # of a word in the names, against one in the text
_MAX_WORDS = 64  # of a query
_SNIPPET_WORDS = 24


@dataclasses.dataclass(frozen=True)
class Hit:
    """An article that a query found."""

    number: int
    snippet: str


class Index:
    """The index of a graph's articles, in memory; threads may share it."""

    def __init__(self, graph: articles.Graph) -> None:
        """Indexes names and texts."""
        self._lock = threading.Lock()
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        self._base.execute(
            "CREATE VIRTUAL TABLE page USING "
            "fts5(names, text, tokenize='porter unicode61')"
        )
        rows = (
            (number, " ".join(article.names), articles.plain(article.text))
            for number, article in enumerate(graph.articles)
        )
        self._base.executemany(
            "INSERT INTO page(rowid, names, text) VALUES(?,?,?)", rows
        )

    def search(self, query: str, most: int = 10) -> list[Hit]:
        """Returns the best articles for any of a query's words, the best first."""
        words = dict.fromkeys(re.findall(r"\w+", query.casefold()))
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in [*words][:_MAX_WORDS])
        sql = (
            f"SELECT rowid, snippet(page, 1, '', '', '...', {_SNIPPET_WORDS}) "
            f"FROM page WHERE page MATCH ? "
            f"ORDER BY bm25(page, {_TITLE_WEIGHT}, 1.0), rowid LIMIT ?"
        )
        with self._lock:
            rows = self._base.execute(sql, (asked, most)).fetchall()
        return [Hit(number, " ".join(text.split())) for number, text in rows]
