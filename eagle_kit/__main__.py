"""`python -m eagle_kit`: the command `eagle-kit`, also for launchers that take a module."""

from eagle_kit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
