"""Learning rate, Muon Split, and the optimizer that is made of them."""
