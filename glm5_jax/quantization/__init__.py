"""Weight matrices as codes of 8 or 4 bits and their scales."""
