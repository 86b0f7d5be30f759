"""Suites that ask the model something, a family a file."""
