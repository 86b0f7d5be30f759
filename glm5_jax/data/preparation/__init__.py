"""Corpora tokenized and packed ahead of training, and read back."""
