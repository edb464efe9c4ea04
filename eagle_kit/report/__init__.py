"""Tables, plots and pages, shared by training, evaluation and benchmarks."""
