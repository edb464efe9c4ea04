"""Clock, metrics, trackers, curves and reports of a run."""
