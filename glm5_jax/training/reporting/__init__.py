"""Reports of a run: metrics, progress, plots, trackers, and accounting."""
