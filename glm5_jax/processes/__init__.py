"""Several processes as one run: who belongs to it, how they meet, how they end."""
