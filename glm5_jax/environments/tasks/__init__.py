"""The tasks that come with the package, and the scoring of their answers.

problems.py makes the problems, ladder.py the taskset of each kind, with an episode of
one turn or, in calculator.py, of several with a tool. maths.py and expressions.py
compare answers. reasoning_gym.py wraps the tasks of another library.
"""
