"""Optimizer, schedule, weight average, and the strategies that update the head: one process, DDP, FSDP2,
ZeRO."""
