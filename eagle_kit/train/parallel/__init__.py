"""Processes of a run: DDP, FSDP2, ZeRO, placement of the target, launching."""
