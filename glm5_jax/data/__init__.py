"""Documents to token ids to packed batches."""
