"""Door for people: `accelerate launch train CONFIG` from the repository root runs `eagle_kit.train`."""

from eagle_kit.train.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
