"""Door for people: `python benchmarks NAME ...`, from any folder."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.path[0] = str(root)  # `python benchmarks` puts this folder there, whose names are no packages
    sys.path.insert(1, str(root / "kernels"))

    from benchmarks.cli import main

    raise SystemExit(main())
