"""Door for people: `python recipes study FILE` and `python recipes pretrain FILE`, from any folder."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # where `recipes` is a package

    from recipes.cli import main

    raise SystemExit(main())
