"""The making of this repository's own heads and targets: trainings, studies, and what runs them.

Run as ``python recipes study FILE`` and ``python recipes pretrain FILE``; no package imports it.
"""
