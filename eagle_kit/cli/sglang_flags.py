"""Flags of SGLang's server for parallelism, attention and experts.

A flag is mapped to an option of ours, accepted where it changes nothing here, or refused by name.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle_kit.core.errors import UserError

LEAVE_OUT = "Leave it out."


def _dest(flag: str) -> str:
    """Name of a flag's value among the parsed arguments."""
    return "sglang_" + flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class SglangFlag:
    """A flag of SGLang that chooses a form of computation.

    Attributes:
        flag: as it is written.
        why: reason why there is no other form here.
        same: values that mean what is done anyway.
        ours: values of ``option``, by those of the flag.
        option: a field of :class:`~eagle_kit.config.engine.EngineConfig`; empty where the flag sets
            none.
        overridden_by: flags that go before this one, each for a part of its meaning, the first for
            ``option``.
        instead: remedy for a value that is refused; default to leave the flag out, or to choose
            another value.
        is_switch: whether it comes without a value.
    """

    flag: str
    why: str
    same: tuple[str, ...] = ()
    ours: Mapping[str, str] = field(default_factory=dict)
    option: str = ""
    overridden_by: tuple[str, ...] = ()
    instead: str = ""
    is_switch: bool = False

    @property
    def dest(self) -> str:
        """Name of its value among the parsed arguments."""
        return _dest(self.flag)

    @property
    def allowed(self) -> str:
        """Values that are accepted, with commas; empty where there are none."""
        return ", ".join((*self.same, *self.ours))

    @property
    def remedy(self) -> str:
        """Remedy for a value that is refused."""
        if self.instead:
            return self.instead
        if self.allowed:
            return f"Leave it out, or use one of {self.allowed}."
        return LEAVE_OUT


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
SGLANG_FLAGS = (
    SglangFlag(
        "--attention-backend",
        "Prompts are read by our Triton kernels, FlashAttention or FlashInfer, and windows by ours",
        ours=PREFILL,
        option="prefill_backend",
        overridden_by=("--prefill-attention-backend", "--decode-attention-backend"),
    ),
    SglangFlag(
        "--prefill-attention-backend",
        "Prompts are read by our Triton kernels, FlashAttention or FlashInfer",
        ours=PREFILL,
        option="prefill_backend",
    ),
    SglangFlag("--decode-attention-backend", WINDOWS, same=("triton",)),
    SglangFlag("--speculative-attention-mode", WINDOWS + ", which are those of decoding", same=("decode",)),
    SglangFlag("--speculative-draft-attention-backend", WINDOWS, same=("triton",)),
    SglangFlag("--moe-runner-backend", RUNNERS, same=("auto",)),
    SglangFlag("--speculative-moe-runner-backend", RUNNERS, same=("auto",)),
    SglangFlag("--moe-a2a-backend", TOKENS, same=("none",)),
    SglangFlag("--speculative-moe-a2a-backend", TOKENS + "; drafts are whole on every rank", same=("none",)),
    SglangFlag("--deepep-mode", TOKENS + ", so there is nothing to dispatch", same=("auto",)),
    SglangFlag("--enable-deepep-moe", TOKENS, is_switch=True),
    SglangFlag("--moe-dense-tp-size", "Dense MLPs are cut among all ranks, as many as there are"),
    SglangFlag(
        "--enable-dp-lm-head",
        "The output layer is cut by vocabulary among all ranks, and greedy tokens need no gathered logits",
        is_switch=True,
    ),
    SglangFlag("--nsa-prefill-backend", SPARSE),
    SglangFlag("--nsa-decode-backend", SPARSE),
    SglangFlag("--mm-attention-backend", "Requests are text, and encoders of pictures are not loaded"),
    SglangFlag("--nnodes", MACHINES, same=("1",), instead=TORCHRUN),
    SglangFlag("--node-rank", MACHINES, same=("0",), instead=TORCHRUN),
    SglangFlag("--dist-init-addr", MACHINES, instead=TORCHRUN),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    group = parser.add_argument_group("flags of SGLang, mapped to those above or refused")

    # Numbers of ranks.
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
    group.add_argument(
        "--dp-size",
        "--data-parallel-size",
        type=int,
        dest="data_parallel_size",
        metavar="N",
        help="1, or with --enable-dp-attention as many as ranks",
    )
    group.add_argument(
        "--enable-ep-moe",
        action="store_const",
        const=True,
        dest="expert_parallel",
        help="the same as --enable-expert-parallel",
    )

    # Names of forms of computation.
    for flag in SGLANG_FLAGS:
        meaning = flag.allowed or "refused, with the reason"
        if flag.option:
            meaning += f"; as {_our_flag(flag)}"
        if flag.is_switch:
            group.add_argument(flag.flag, dest=flag.dest, help=meaning, action="store_const", const="")
        else:
            group.add_argument(flag.flag, dest=flag.dest, help=meaning, metavar="NAME")


def apply(args: argparse.Namespace) -> None:
    """Write the values of SGLang's flags into the arguments of ours. Raise UserError for what does
    not exist here."""
    _apply_numbers_of_ranks(args)
    for flag in SGLANG_FLAGS:
        value = getattr(args, flag.dest)
        overrides = [getattr(args, _dest(name)) is not None for name in flag.overridden_by]
        is_overridden = bool(overrides) and all(overrides)
        if value is None or value in flag.same or is_overridden:
            continue
        if value not in flag.ours:
            given = f"{flag.flag} {value}".rstrip()
            raise UserError(f"{given} does not exist here. {flag.why}.", flag.remedy)

        # Set our option, unless the flag that goes before this one does.
        if overrides and overrides[0]:
            continue
        given = getattr(args, flag.option)
        if given not in (None, flag.ours[value]):
            raise UserError(
                f"{flag.flag} {value} was given beside {_our_flag(flag)} {given}.",
                "Give one or the other.",
            )
        setattr(args, flag.option, flag.ours[value])


def _apply_numbers_of_ranks(args: argparse.Namespace) -> None:
    """Check ``--dp-size`` and ``--ep-size`` against the number of ranks. Raises UserError."""
    ranks = args.tensor_parallel or 1
    replicas = args.data_parallel_size
    if args.data_parallel_attention and replicas not in (None, ranks):
        raise UserError(
            f"--dp-size is {replicas}, and {ranks} ranks share requests: each has its own, and all heads.",
            f"Give --dp-size {ranks}.",
        )
    if not args.data_parallel_attention and replicas not in (None, 1):
        raise UserError(
            f"--dp-size {replicas}: a server is one replica.",
            "Start several behind a router (docs/how-to/serve-a-fleet.md), or give --enable-dp-attention.",
        )
    experts = args.expert_parallel_size
    if experts not in (None, 1, ranks):
        raise UserError(
            f"--ep-size is {experts}, and {ranks} ranks share the target: all share experts, or none.",
            f"Give --ep-size {ranks} or 1.",
        )
    if experts not in (None, 1):
        args.expert_parallel = True


def _our_flag(flag: SglangFlag) -> str:
    """Our flag for the same option."""
    return f"--{flag.option.replace('_', '-')}"
