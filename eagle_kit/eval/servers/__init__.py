"""Running servers as settings of an evaluation: ``eagle-kit eval --base-url URL``."""
