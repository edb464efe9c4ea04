"""Settings of trackers and of the report, of a training and of an evaluation."""

import os
from pathlib import Path
from typing import Any, Literal

from eagle_kit.config.options import Section


class TrackingConfig(Section):
    """Trackers and report, which get the figures besides ``metrics.jsonl``."""

    wandb: Literal["off", "offline", "online"] = "off"
    """``off``, ``offline`` (files in the run folder) or ``online``."""

    project: str = "eagle-kit"
    """Name of the project there."""

    entity: str | None = None
    """User or team that the project belongs to; null is wandb's default."""

    group: str | None = None
    """Group of the run; null is none."""

    name: str | None = None
    """Name of the run; null is that of the run folder."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""

    tensorboard: bool = False
    """Write event files into ``tensorboard/`` of the run folder."""

    report: bool | None = None
    """Draw ``report.html`` in the run folder at every judgement and at the end; null does so where matplotlib
    is installed.
    """

    def wandb_options(self, folder: str | Path) -> dict[str, Any]:
        """Arguments of ``wandb.init`` besides the project. Settings that are null are left out.

        Args:
            folder: the run folder, in which wandb writes its files.
        """
        name = self.name or os.path.basename(os.path.abspath(folder))
        options: dict[str, Any] = {"dir": str(folder), "mode": self.wandb, "name": name}
        if self.entity is not None:
            options["entity"] = self.entity
        if self.group is not None:
            options["group"] = self.group
        if self.tags:
            options["tags"] = list(self.tags)
        return options
