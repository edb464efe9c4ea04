"""`python -m eagle_kit.cli` is `eagle-kit`."""

from eagle_kit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
