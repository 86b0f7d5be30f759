"""Training: the loss, the jitted step, the loop that every stage uses."""
