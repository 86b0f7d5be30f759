"""Chains: releases of one package as issues one after the other, on one tree.

stored.py is a chain as it is kept, mine.py makes chains of releases, and world.py plays
them.
"""
