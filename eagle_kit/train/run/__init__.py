"""A training run: loop, optimiser step, data order, validation, checkpoints, run folder and reports."""
