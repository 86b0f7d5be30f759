"""Search: questions over a graph of linked articles, answered with a search engine.

articles.py reads a collection, index.py searches it, questions.py makes questions of
walks over its links, screen.py drops those that are too easy or have several answers,
world.py is the taskset.
"""
