"""Folders in buckets, gs://BUCKET/FOLDER and s3://BUCKET/FOLDER. Imports no jax."""
