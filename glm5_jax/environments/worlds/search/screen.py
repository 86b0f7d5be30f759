"""Drops questions that need no search, after the paper's three filters.

The paper drops what a model solves without tools, what an early agent solves in a few
steps, and what a verification agent, which looks for other answers forward and
backward, cannot confirm. Here no model is asked, so that every machine gets the same
questions:

    guessed     one of 8 guesses of a reader who knows every title, what it is filed
                under and how often it is referred to, but opens nothing
    few steps   the answer is among the results of one search, or the first article
                already links to it
    unsure      the described article cannot be found by its description, or the way is
                not the only one (questions.is_only_way)
"""

import re

from glm5_jax.environments.worlds.search import articles, index, questions

NUM_GUESSES = 8
NUM_HITS = 10


def flaw(
    graph: articles.Graph, search: index.Index, question: questions.Question
) -> str:
    """Returns why a question is dropped, "" if it is good."""
    first, answer = question.path[0], question.path[-1]
    text = question.text()
    if any(graph.find(graph.articles[n].title) != n for n in question.path):
        return "a title on the way is another article's, too"
    if names_in(text, graph.articles[answer]):
        return "the question names the answer"
    if answer in guesses(graph, question):
        return "guessed without a search"
    if answer in graph.targets[first]:
        return "few steps: the first article links to the answer"
    queries = text, question.description
    hits = [[hit.number for hit in search.search(q, NUM_HITS)] for q in queries]
    if any(answer in found for found in hits):
        return "few steps: one search finds the answer"
    if first not in hits[1]:
        return "the first article is not found by its description"
    firsts = questions.described(graph)[question.description]
    if not questions.is_only_way(graph, firsts, question):
        return "other articles fit all clues"
    return ""


def guesses(graph: articles.Graph, question: questions.Question) -> list[int]:
    """Returns the articles that fit what is told of the answer, best known first."""
    fit = [
        number
        for number, article in enumerate(graph.articles)
        if all(clue.holds(article) for clue in question.clues[-1])
    ]
    return sorted(fit, key=lambda n: (-len(graph.sources[n]), n))[:NUM_GUESSES]


def names_in(text: str, article: articles.Article) -> bool:
    """Returns whether a text contains a name of an article as whole words."""
    said = articles.normalize(text)
    return any(
        re.search(rf"(?<!\w){re.escape(articles.normalize(name))}(?!\w)", said)
        for name in article.names
    )
