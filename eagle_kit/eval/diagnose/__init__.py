"""Find out why few drafts are accepted: faults are undone, and the one whose undoing restores acceptance is
named."""
