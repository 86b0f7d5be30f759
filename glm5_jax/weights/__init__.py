"""Models' weights on disk: Hugging Face folders, run folders, conversion, loading."""
