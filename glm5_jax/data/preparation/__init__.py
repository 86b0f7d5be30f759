"""Corpora tokenized and packed ahead of training, and read back.

prepare.py makes a folder: plan.py cuts the source (inputs.py) into parts, part.py makes
the shards of one part (shards.py), workers.py runs several at a time, and index.py
lists what was written. prepared.py reads such folders for training.
"""
