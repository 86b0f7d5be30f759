"""Slides: the agent writes a deck in HTML, which a browser lays out and a judge reads.

briefs.py makes briefs from seeds, pages.py sound pages for them, flaws.py and
labelled.py pages with one named flaw each. markup.py reads a page's source, measure.py
takes the facts of the rendered page, pixels.py those of its picture, and checks.py
judges them by a table of named checks. world.py plays episodes, selection.py chooses
what is worth training on.
"""
