"""Costs of programs on chips that are not there.

Imports go plan -> compiled -> estimate -> the files beside this one -> hlo.
"""
