"""Inference: the engine that samples continuations, and scoring of given tokens."""
