"""Conversations as token ids: the chat template, its inverse, messages on disk."""
