"""The tasks that come with the package, and what scores their answers.

problems.py makes the problems, ladder.py the taskset of each kind, with an episode of
one turn or, in calculator.py, of several with a tool. maths.py and expressions.py
compare answers. reasoning_gym.py is the same for an outside library.
"""
