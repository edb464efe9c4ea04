"""Profiles of a server's steps, which ``/start_profile`` and ``/stop_profile`` start and stop."""

import asyncio
import time
from pathlib import Path

from eagle_kit.core.errors import UserError, first_line, shown
from eagle_kit.core.files import expand, writing_remedy
from eagle_kit.engine.step_profile import (
    SUFFIX,
    ProfileSettings,
    StepProfile,
    available_activities,
    prepare_profiles,
)
from eagle_kit.server.api.errors import ApiError
from eagle_kit.server.api.protocol import ProfileRequest
from eagle_kit.server.api.responses import ProfileReport
from eagle_kit.server.async_engine import AsyncEngine

NUM_STEPS = 100
"""Steps of a profile that asks for no number."""


class Profiles:
    """Profiles of an engine, one at a time. The event loop makes all calls.

    Args:
        engine: is profiled in its own thread.
        folder: of the traces; None refuses profiles.
    """

    def __init__(self, engine: AsyncEngine, folder: Path | None) -> None:
        self._engine = engine
        self._folder = None if folder is None else expand(folder).resolve()
        self._last: StepProfile | None = None
        if folder is not None:
            prepare_profiles()

    async def start(self, body: ProfileRequest) -> ProfileReport:
        """Start a profile of the next steps.

        Raises:
            ApiError: there is no folder for traces (404), or a profile is running (409).
            UserError: the folder or the activities of the body cannot be used here.
            Overloaded, EngineFailed: see :meth:`AsyncEngine.add`.
        """
        self._engine.check_room(0)
        settings = self._settings(body)
        await self._engine.call(lambda: self._start_between_steps(settings))
        return self._report(settings, settings.num_steps, is_running=True)

    async def stop(self) -> ProfileReport:
        """End the profile, if it has not ended by itself, and wait for its file.

        Raises:
            ApiError: there is no folder for traces (404), no profile was started since the last call (409),
                or the file could not be written (500).
            EngineFailed: the engine has failed, or was shut down.
        """
        self._folder_of(None)
        profile = self._last
        if profile is None:
            raise ApiError(409, "No profile is running. Start one with /start_profile.", code="no_profile")
        self._last = None

        await self._engine.call(self._engine.engine.stop_profile)
        try:
            # Shielded: a call that is cancelled must not cancel what the thread that writes will set.
            await asyncio.shield(asyncio.wrap_future(profile.written))
        except (OSError, RuntimeError) as error:
            remedy = writing_remedy(error, "start the server with another --profile-dir")
            message = f"The trace could not be written: {first_line(error)}. {remedy}"
            raise ApiError(500, message, code="profile_not_written") from error
        return self._report(profile.settings, profile.num_steps, is_running=False)

    def _start_between_steps(self, settings: ProfileSettings) -> None:
        """Start a profile, in the engine's thread."""
        engine = self._engine.engine
        if engine.profile is not None:
            missing = engine.profile.settings.num_steps - engine.profile.num_steps
            message = f"A profile is running, of {missing} more steps. End it with /stop_profile."
            raise ApiError(409, message, code="profile_running")
        engine.start_profile(settings)
        self._last = engine.profile

    def _settings(self, body: ProfileRequest) -> ProfileSettings:
        """Settings of a profile that a body asks for. Raises ApiError and UserError."""
        folder = self._folder_of(body.output_dir)

        # The activities that the engine's device has, unless the body names some.
        available = available_activities(self._engine.engine.runner.device)
        wanted = tuple(dict.fromkeys(body.activities or available))
        if "GPU" in wanted and "GPU" not in available:
            raise UserError("activities has GPU, and the engine runs on a CPU.", "Leave GPU out.")

        # Milliseconds keep the names of profiles in one second apart.
        now = time.time()
        milliseconds = int(now % 1 * 1000)
        name = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{milliseconds:03d}"
        return ProfileSettings(
            folder,
            name,
            NUM_STEPS if body.num_steps is None else body.num_steps,
            wanted,
            with_stack=bool(body.with_stack),
            record_shapes=bool(body.record_shapes),
        )

    def _folder_of(self, output_dir: str | None) -> Path:
        """Folder of the traces: the server's own, or one in it. Raises ApiError and UserError."""
        if self._folder is None:
            raise ApiError(
                404,
                "This server makes no profiles. Start it with --profile-dir DIR.",
                code="profiles_off",
            )
        if output_dir is None:
            return self._folder
        if "\0" in output_dir:
            raise UserError("The output_dir has a null character.", "Leave it out.")
        folder = (self._folder / output_dir).resolve()
        if not folder.is_relative_to(self._folder):
            raise UserError(
                f"The output_dir {shown(output_dir)} is outside of the server's --profile-dir.",
                "Leave it out, or name a folder in it.",
            )
        return folder

    def _report(self, settings: ProfileSettings, num_steps: int, *, is_running: bool) -> ProfileReport:
        """Report on a profile, with the names of all ranks' files."""
        assert self._folder is not None
        ranks = self._engine.engine.target.ranks
        num_ranks = 1 if ranks is None else ranks.size
        folder = settings.folder.relative_to(self._folder)
        files = [str(folder / f"{settings.name}-rank{rank}{SUFFIX}") for rank in range(num_ranks)]
        return ProfileReport(status="running" if is_running else "written", num_steps=num_steps, files=files)
