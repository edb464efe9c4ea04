"""A training run: loop, step, state, folder, judge."""
