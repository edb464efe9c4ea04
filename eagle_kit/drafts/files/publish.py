"""Upload of an exported draft to a model repository of the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.files.draft_files import METADATA, WEIGHTS
from eagle_kit.models.loading.source import LOG_IN, REPOSITORY, hub_error

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".gguf",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".nemo",
)
"""Ends of the names of files with weights, and of their indices, as transformers and others write them."""


class Repository:
    """A repository that a draft is uploaded to; it need not exist.

    Args:
        name: ``org/name``.
        private: whether it is, if it is made.

    Raises:
        UserError: not a name, no token, no access, or a repository that holds other weights than a draft's,
            or is public and should be private. Nothing is uploaded or made yet.
    """

    def __init__(self, name: str, private: bool = False) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import RepositoryNotFoundError

        if not REPOSITORY.fullmatch(name):
            raise UserError(f"{name!r} is not the name of a repository.", "Give one such as org/name.")
        if get_token() is None:
            raise UserError("No token of the hub was found on this machine.", LOG_IN)
        self.name = name
        self.private = private
        self.api = HfApi()
        with self._asking():
            try:
                info = self.api.model_info(name)
            except RepositoryNotFoundError:
                return
        found = [file.rfilename for file in info.siblings or ()]
        if others := [file for file in found if file.endswith(WEIGHT_SUFFIXES) and file != WEIGHTS]:
            raise UserError(
                f"The repository {name} holds other weights than a draft's ({', '.join(others[:4])}).",
                "Choose a new repository.",
            )
        if private and not info.private:
            raise UserError(
                f"The repository {name} exists and is public.",
                "Make it private on its page, or leave --private out.",
            )
        if WEIGHTS in found and METADATA not in found:
            raise UserError(
                f"The repository {name} holds a model of another making.", "Choose a new repository."
            )

    def upload(self, folder: Path) -> str:
        """Upload the files of ``folder`` in one commit, the repository made if need be; return its address.

        Raises:
            UserError: no right to write there, or no network.
        """
        with self._asking():
            self.api.create_repo(self.name, private=self.private or None, exist_ok=True)
            self.api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message="Upload a draft of eagle-kit"
            )
        return f"{self.api.endpoint}/{self.name}"

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # network, access and naming errors of many kinds
            raise hub_error(error, self.name, f"The draft could not be uploaded to {self.name}") from error
