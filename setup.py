"""What pyproject.toml cannot say: a wheel carries the configs of the checkout as ``eagle_kit/configs``."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithConfigs(build_py):
    """Copy the configs beside the modules; an editable install reads them from the checkout."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if self.editable_mode:
            return
        place = Path(self.build_lib) / "eagle_kit" / "configs"
        place.mkdir(parents=True, exist_ok=True)
        for file in sorted((HERE / "configs").glob("*.yaml")):
            shutil.copyfile(file, place / file.name)


setup(cmdclass={"build_py": BuildWithConfigs})
