"""Draft folders: opened, checked against a target, converted, exported, described and uploaded."""
