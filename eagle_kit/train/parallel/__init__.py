"""Launch environment, processes, and placement of the target; the strategies are in ``train/optim``."""
