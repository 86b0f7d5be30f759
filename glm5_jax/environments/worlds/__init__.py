"""Worlds: environments with tools, whose tasks are proven before they are served."""
