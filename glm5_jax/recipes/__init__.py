"""Recipes: whole pipelines of training stages, and their reports."""
