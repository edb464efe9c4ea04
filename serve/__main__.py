"""Door for people: `python serve DRAFT_OR_TARGET` is `eagle-kit serve DRAFT_OR_TARGET`."""

import sys

from eagle_kit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
