"""Flags of SGLang's server for parallelism, attention and experts: what is here an option of ours, or is so
anyway, is taken; everything else is refused by name."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle_kit.core.errors import UserError


@dataclass(frozen=True)
class Choice:
    """A flag with names of forms of computation.

    Attributes:
        flag: as SGLang has it.
        why: the reason why there is no other form here.
        same: values that say what is done anyway.
        ours: values of ``option``, by those of the flag.
        option: a field of :class:`~eagle_kit.config.engine.EngineConfig`.
    """

    flag: str
    why: str
    same: tuple[str, ...] = ()
    ours: Mapping[str, str] = field(default_factory=dict)
    option: str = ""

    @property
    def name(self) -> str:
        """Of its argument."""
        return "sglang_" + self.flag.removeprefix("--").replace("-", "_")


PREFILL = {"triton": "triton", "flashinfer": "flashinfer", "fa3": "flash-attn", "fa4": "flash-attn"}
WINDOWS = "Windows of drafts are verified, and drafts extended, by our Triton kernels"
RUNNERS = "The dtype and the GPU choose between torch's grouped matmul and our Triton kernels"
TOKENS = "Every rank has every token, and one all-reduce adds what the experts of all give"
CHOICES = (
    Choice(
        "--attention-backend",
        "Prompts are read by our Triton kernels, FlashAttention or FlashInfer, and windows by ours",
        ours=PREFILL,
        option="prefill_backend",
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
    for choice in CHOICES:
        allowed = ", ".join((*choice.same, *choice.ours))
        meaning = f"{allowed}; as --{choice.option.replace('_', '-')}" if choice.option else allowed
        group.add_argument(choice.flag, dest=choice.name, metavar="NAME", help=meaning)


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
        if value is None or value in choice.same:
            continue
        if value not in choice.ours:
            raise UserError(
                f"{choice.flag} {value} does not exist here. {choice.why}.",
                f"Leave it out, or use one of {', '.join((*choice.same, *choice.ours))}.",
            )
        given = getattr(args, choice.option)
        if given not in (None, choice.ours[value]):
            raise UserError(
                f"{choice.flag} {value} was given beside --{choice.option.replace('_', '-')} {given}.",
                "Give one or the other.",
            )
        setattr(args, choice.option, choice.ours[value])
