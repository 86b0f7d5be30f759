"""Reads the text of compiled programs: memory, traffic and collectives."""
