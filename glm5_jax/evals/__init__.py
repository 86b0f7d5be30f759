"""Evaluations: suites of tasks and measurements of a model's inside.

record.py says what a suite is; read it first. suites/ has those that ask the model,
probes/ those that look into it, catalogue.py lists all of them, runner.py runs them.
"""
