"""What a model with given weights does: sampled continuations and scores."""
