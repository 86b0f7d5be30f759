"""Worlds: environments with tools, whose tasks can be proven."""
