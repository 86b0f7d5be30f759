"""Attention: one file for each variant."""
