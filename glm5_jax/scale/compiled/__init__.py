"""Compiled programs: their sizes, their costs, and reports of both."""
