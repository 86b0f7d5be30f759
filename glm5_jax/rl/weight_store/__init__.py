"""Versions of the weights as files, from a trainer to any number of engines.

writer.py adds a version, whole or as the difference from the one before. reader.py
takes a newer version, checks every byte of it, and places it on devices. manifest.py is
what a version says about itself, coding.py how windows become bytes. sources.py reads
from a folder or a URL, and files.py is the other end of the URL.

A version never changes once it has its name, and has its name only when it is complete.
"""
