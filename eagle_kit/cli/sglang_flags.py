"""Flags of SGLang's server for parallelism, attention and experts: what is here an option of ours, or is so
anyway, is taken; everything else is refused by name."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_kit.core.errors import UserError

LEAVE_OUT = "Leave it out."


def _name(flag: str) -> str:
    return "sglang_" + flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Choice:
    """A flag with names of forms of computation.

    Attributes:
        flag: as SGLang has it.
        why: the reason why there is no other form here.
        same: values that say what is done anyway.
        ours: values of ``option``, by those of the flag.
        option: a field of :class:`~eagle_kit.config.engine.EngineConfig`.
        parts: flags that win over this one, each for a part of what it says; the first for ``option``.
        instead: what to do; default to leave it out, or to choose an allowed value.
        is_switch: whether it comes without a value.
    """

    flag: str
    why: str
    same: tuple[str, ...] = ()
    ours: Mapping[str, str] = field(default_factory=dict)
    option: str = ""
    parts: tuple[str, ...] = ()
    instead: str = ""
    is_switch: bool = False

    @property
    def name(self) -> str:
        """Of its argument."""
        return _name(self.flag)

    @property
    def allowed(self) -> str:
        """Values that are taken; empty where there are none."""
        return ", ".join((*self.same, *self.ours))

    @property
    def remedy(self) -> str:
        """What to do in place of another value."""
        return self.instead or (f"Leave it out, or use one of {self.allowed}." if self.allowed else LEAVE_OUT)


PREFILL = {"triton": "triton", "flashinfer": "flashinfer", "fa3": "flash-attn", "fa4": "flash-attn"}
WINDOWS = "Windows of drafts are verified, and drafts extended, by our Triton kernels"
RUNNERS = "The dtype and the GPU choose between torch's grouped matmul and our Triton kernels"
TOKENS = "Every rank has every token, and one all-reduce adds what the experts of all give"
SPARSE = "No target here has sparse attention"
MACHINES = "Ranks of several machines are started by torchrun, and those of one need no address"
TORCHRUN = (
    "Run torchrun --nnodes N --node-rank I --rdzv-endpoint HOST:PORT --nproc-per-node GPUS -m eagle_kit "
    "serve ... on each machine."
)
CHOICES = (
    Choice(
        "--attention-backend",
        "Prompts are read by our Triton kernels, FlashAttention or FlashInfer, and windows by ours",
        ours=PREFILL,
        option="prefill_backend",
        parts=("--prefill-attention-backend", "--decode-attention-backend"),
    ),
    Choice(
        "--prefill-attention-backend",
        "Prompts are read by our Triton kernels, FlashAttention or FlashInfer",
        ours=PREFILL,
        option="prefill_backend",
    ),
    Choice("--decode-attention-backend", WINDOWS, same=("triton",)),
    Choice("--speculative-attention-mode", WINDOWS + ", which are those of decoding", same=("decode",)),
    Choice("--speculative-draft-attention-backend", WINDOWS, same=("triton",)),
    Choice("--moe-runner-backend", RUNNERS, same=("auto",)),
    Choice("--speculative-moe-runner-backend", RUNNERS, same=("auto",)),
    Choice("--moe-a2a-backend", TOKENS, same=("none",)),
    Choice("--speculative-moe-a2a-backend", TOKENS + "; drafts are whole on every rank", same=("none",)),
    Choice("--deepep-mode", TOKENS + ", so there is nothing to dispatch", same=("auto",)),
    Choice("--enable-deepep-moe", TOKENS, is_switch=True),
    Choice("--moe-dense-tp-size", "Dense MLPs are cut among all ranks, as many as there are"),
    Choice(
        "--enable-dp-lm-head",
        "The output layer is cut by vocabulary among all ranks, and greedy tokens need no gathered logits",
        is_switch=True,
    ),
    Choice("--nsa-prefill-backend", SPARSE),
    Choice("--nsa-decode-backend", SPARSE),
    Choice("--mm-attention-backend", "Requests are text, and encoders of pictures are not loaded"),
    Choice("--nnodes", MACHINES, same=("1",), instead=TORCHRUN),
    Choice("--node-rank", MACHINES, same=("0",), instead=TORCHRUN),
    Choice("--dist-init-addr", MACHINES, instead=TORCHRUN),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    group = parser.add_argument_group("flags of SGLang, mapped to those above or refused")
    group.add_argument(
        "--tp-size",
        "--tensor-parallel-size",
        type=int,
        dest="tensor_parallel",
        metavar="N",
        help="the same as --tensor-parallel",
    )
    group.add_argument(
        "--ep-size",
        "--expert-parallel-size",
        type=int,
        dest="expert_parallel_size",
        metavar="N",
        help="as many as ranks: the same as --enable-expert-parallel",
    )
    replicas = "--dp-size", "--data-parallel-size"
    meaning = "1, or with --enable-dp-attention as many as ranks"
    group.add_argument(*replicas, type=int, dest="data_parallel_size", metavar="N", help=meaning)
    meaning = "the same as --enable-expert-parallel"
    group.add_argument(
        "--enable-ep-moe", action="store_const", const=True, dest="expert_parallel", help=meaning
    )
    for choice in CHOICES:
        meaning = choice.allowed or "refused, with the reason"
        if choice.option:
            meaning += f"; as --{choice.option.replace('_', '-')}"
        kind: dict[str, Any] = (
            {"action": "store_const", "const": ""} if choice.is_switch else {"metavar": "NAME"}
        )
        group.add_argument(choice.flag, dest=choice.name, help=meaning, **kind)


def apply(args: argparse.Namespace) -> None:
    """Put what the flags say into the arguments of ours. Raise UserError for what does not exist here."""
    parts, ranks = args.data_parallel_size, args.tensor_parallel or 1
    if args.data_parallel_attention and parts not in (None, ranks):
        raise UserError(
            f"--dp-size is {parts}, and {ranks} ranks share requests: each has its own, and all heads.",
            f"Give --dp-size {ranks}.",
        )
    if not args.data_parallel_attention and parts not in (None, 1):
        raise UserError(
            f"--dp-size {parts}: a server is one replica.",
            "Start several behind a router (docs/serving.md), or give --enable-dp-attention.",
        )
    if (experts := args.expert_parallel_size) not in (None, 1):
        if experts != args.tensor_parallel:
            ranks = args.tensor_parallel or 1
            raise UserError(
                f"--ep-size is {experts}, and {ranks} ranks share the target: all share experts, or none.",
                f"Give --ep-size {ranks} or 1.",
            )
        args.expert_parallel = True
    for choice in CHOICES:
        value = getattr(args, choice.name)
        of_parts = [getattr(args, _name(flag)) is not None for flag in choice.parts]
        if value is None or value in choice.same or (of_parts and all(of_parts)):
            continue
        if value not in choice.ours:
            given = f"{choice.flag} {value}".rstrip()
            raise UserError(f"{given} does not exist here. {choice.why}.", choice.remedy)
        if any(of_parts[:1]):
            continue
        given = getattr(args, choice.option)
        if given not in (None, choice.ours[value]):
            raise UserError(
                f"{choice.flag} {value} was given beside --{choice.option.replace('_', '-')} {given}.",
                "Give one or the other.",
            )
        setattr(args, choice.option, choice.ours[value])
