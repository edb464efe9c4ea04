"""Tables, figures, pages, environment of a measurement: shared by training, evaluation and benchmarks."""
