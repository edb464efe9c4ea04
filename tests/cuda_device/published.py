"""Published models at full size, whose weights take no memory and no disk.

The folder of a known target has its ``config.json`` and one file of weights: a header with the published
names, types and shapes, and a hole in place of the bytes. Within :func:`unread_weights` the loaders get
memory that nobody has written in place of the bytes of the file. They run as they are, and nothing is read.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead
from eagle_kit.drafts.mtp.kind import MTP
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.known_targets import known_target, target_fp8_layout
from eagle_kit.models.loading.loader import parse_target, stays_exact
from eagle_kit.models.loading.published import published_parts
from eagle_kit.models.loading.quantize import quantizable
from eagle_kit.models.loading.share import DTYPES
from eagle_kit.models.targets.llama import LlamaModel
from tests.cuda_device.device import copies_up_to

LARGEST_COPY = 1 << 20
"""Bytes of the largest copy that is made: token ids, masks and results of steps, and not weights."""
FP8 = "F8_E4M3"
FP32 = "F32"
BF16 = "BF16"


class Tensor(NamedTuple):
    """Type of a published tensor, by its name in safetensors, and its shape."""

    kind: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPES[self.kind].itemsize


def publish(name: str, folder: Path) -> Path:
    """Make the folder of a known target that is not bridged, with its MTP modules -> the folder."""
    known = known_target(name)
    assert known is not None, name
    config = parse_target(known.config)
    tensors = published_tensors(config, target_fp8_layout(name))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": config.model_type, **known.config}))
    write_hole(folder / "model.safetensors", tensors)
    return folder


def published_tensors(config: TargetConfig, layout: FP8Layout | None) -> dict[str, Tensor]:
    """Tensors of a checkpoint by their published names.

    Linear layers and routed experts of decoder layers are in fp8 where the checkpoint has a ``layout`` of
    scales.
    """
    with torch.device("meta"):
        model = LlamaModel(config)
    in_fp8 = set[str]()
    if layout is not None:
        in_fp8 = {name for name, _ in quantizable(model)}
        in_fp8 |= {name for name, _ in model.named_modules() if name.endswith("kv_b_proj")}

    # The layers of the decoder, and what lies around them.
    found: dict[str, Tensor] = {}
    parts = published_parts(model.named_parameters(), config, ())
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        kind = BF16
        if owner in in_fp8 and parameter.ndim > 1:
            kind = FP8
        elif stays_exact(model, name):
            kind = FP32
        for part in parts[name]:
            _add(found, _published(part.name), Tensor(kind, part.shape), layout)

    # The modules of multi-token prediction: layers behind the last one, of its types.
    if config.num_mtp_layers:
        last = config.num_layers - 1
        with torch.device("meta"):
            head = MTPHead(MTPConfig(config, config.num_mtp_layers))
        for group in MTP.parts(head, ()).values():
            for part in group:
                number = int(part.name.split(".")[2])
                leaf = part.name.removeprefix(f"model.layers.{number}.")
                like = found.get(f"model.layers.{last}.{leaf}", Tensor(BF16, part.shape))
                name = f"model.layers.{config.num_layers + number}.{leaf}"
                _add(found, name, Tensor(like.kind, part.shape), layout)
    return found


def _published(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _add(found: dict[str, Tensor], name: str, tensor: Tensor, layout: FP8Layout | None) -> None:
    """Add a tensor, and its scales where it is in fp8."""
    found[name] = tensor
    if tensor.kind == FP8:
        assert layout is not None
        found[name + layout.suffix] = Tensor(FP32, layout.scale_shapes(tensor.shape)[0])


def write_hole(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of safetensors whose header is there and whose bytes are a hole, which takes no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end = start + tensor.num_bytes
        header[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + end)


class UnreadSlice:
    """A tensor of a file, of which parts are taken without reading them."""

    def __init__(self, about: Mapping[str, Any], device: str) -> None:
        self._about = about
        self._device = device

    def get_shape(self) -> list[int]:
        """Shape of the whole."""
        return self._about["shape"]

    def get_dtype(self) -> str:
        """Type by its name in safetensors."""
        return self._about["dtype"]

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = torch.empty(self.get_shape(), device="meta")
        dtype = DTYPES[self.get_dtype()]
        return torch.empty(whole[index].shape, dtype=dtype, device=self._device)


class UnreadFile(AbstractContextManager["UnreadFile"]):
    """A file of safetensors whose tensors are memory that nobody has written.

    The memory is the host's, as what safetensors maps. Weights in fp8 and their scales get memory of the
    device, where no kernel runs: the loader checks and joins them on the host, which would write the memory.
    """

    def __init__(self, path: str, framework: str) -> None:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(size))

    def __exit__(self, *error: Any) -> None:
        """There is nothing to close."""

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._header)

    def get_tensor(self, name: str) -> torch.Tensor:
        """The whole of a tensor."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> UnreadSlice:
        """A tensor of which parts are taken."""
        about = self._header[name]
        is_fp8 = about["dtype"] == FP8 or name.endswith("_scale_inv")
        return UnreadSlice(about, "cuda" if is_fp8 else "cpu")


@contextmanager
def unread_weights() -> Iterator[None]:
    """Within, the loaders read no file of weights, new layers have no first weights, and none are copied."""
    names = ("kaiming_uniform_", "uniform_", "normal_")
    with ExitStack() as stack:
        stack.enter_context(mock.patch("eagle_kit.models.loading.loader.safe_open", UnreadFile))
        for name in names:
            stack.enter_context(mock.patch.object(nn.init, name, _as_it_is))
        stack.enter_context(copies_up_to(LARGEST_COPY))
        yield


def _as_it_is(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return tensor
