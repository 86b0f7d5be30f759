"""Front-end tasks: a page for a brief, and a checklist that decides it.

draft.py says what a task is made of, families/ make them from seeds. oracle.py decides
items exactly, judge.py lets a model decide them with a browser: scripted.py is one that
errs at a set rate. rates.py has the figures, traces.py stores and verifies what was
judged, world.py plays episodes.
"""
