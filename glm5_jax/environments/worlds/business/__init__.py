"""A small shop for a year: orders, prices, deliveries, and what is left at the end.

setting.py draws a shop's goods and suppliers from a seed, shop.py lets days pass,
keepers.py has scripted shopkeepers, world.py is the taskset.
"""
