"""Terminal tasks written by a model: drafted, built into folders, proven or refined.

answers.py asks for drafts and reads them, steps.py takes one task through the steps,
run.py makes many and tells the yield.
"""
