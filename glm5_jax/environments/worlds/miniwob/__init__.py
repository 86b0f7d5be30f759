"""MiniWoB++'s web pages as tasks for an agent with a browser.

environments/browser/ starts a confined Chromium, page.py drives a page, oracles.py
solves some families by a script, and world.py plays them.
"""
