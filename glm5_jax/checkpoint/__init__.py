"""Parameters on disk: runs of our own, and Hugging Face folders."""
