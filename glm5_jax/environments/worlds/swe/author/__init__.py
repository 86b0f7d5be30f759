"""How a package is tested, found by a model where no rule finds it.

answers.py is what is asked and how an answer is read, find.py asks and tries answers.
"""
