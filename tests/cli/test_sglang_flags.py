"""SGLang's flags of parallelism, attention and experts: they mean our options, or are refused by name."""

import argparse

import pytest

from eagle_kit.cli import serve, serve_flags, sglang_flags
from eagle_kit.cli.sglang_flags import SGLANG_FLAGS
from eagle_kit.core.errors import UserError


def config_of(*flags):
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    args = parser.parse_args(["a-target", *flags])
    sglang_flags.apply(args)
    return serve_flags.engine_config(args)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--tp-size", "4"), {"tensor_parallel": 4, "expert_parallel": False}),
        (("--tensor-parallel-size", "2", "--ep-size", "2"), {"tensor_parallel": 2, "expert_parallel": True}),
        (("--tp-size", "2", "--ep-size", "1", "--dp-size", "1"), {"expert_parallel": False}),
        (
            ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
            {"tensor_parallel": 2, "data_parallel_attention": True},
        ),
        (("--attention-backend", "fa3"), {"prefill_backend": "flash-attn"}),
        (("--prefill-attention-backend", "flashinfer"), {"prefill_backend": "flashinfer"}),
        (("--attention-backend", "triton", "--prefill-backend", "triton"), {"prefill_backend": "triton"}),
        (
            ("--attention-backend", "triton", "--prefill-attention-backend", "fa3"),
            {"prefill_backend": "flash-attn"},
        ),
        (
            (
                "--attention-backend",
                "flashmla",
                "--prefill-attention-backend",
                "flashinfer",
                "--decode-attention-backend",
                "triton",
            ),
            {"prefill_backend": "flashinfer"},
        ),
        (
            ("--attention-backend", "fa3", "--decode-attention-backend", "triton"),
            {"prefill_backend": "flash-attn"},
        ),
        (("--tp-size", "2", "--enable-ep-moe"), {"tensor_parallel": 2, "expert_parallel": True}),
        (("--nnodes", "1", "--node-rank", "0", "--deepep-mode", "auto"), {"tensor_parallel": 1}),
        (("--moe-a2a-backend", "none", "--moe-runner-backend", "auto"), {"prefill_backend": "auto"}),
    ],
)
def test_flags_mean_our_options(flags, wanted):
    config = config_of(*flags)
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--enable-dp-attention", "--tp-size", "4", "--dp-size", "2"), "--dp-size is 2, and 4 ranks share"),
        (("--enable-dp-attention", "--tp-size", "4", "--dp-size", "1"), "--dp-size is 1, and 4 ranks share"),
        (("--enable-dp-attention",), "among the ranks of tensor parallelism, and there is one"),
        (("--dp-size", "2"), "a server is one replica"),
        (("--tp-size", "4", "--ep-size", "2"), "--ep-size is 2, and 4 ranks share"),
        (("--ep-size", "2"), "--ep-size is 2, and 1 ranks share"),
        (("--attention-backend", "fa3", "--prefill-backend", "triton"), "beside --prefill-backend triton"),
        (
            ("--attention-backend", "flashmla", "--prefill-attention-backend", "fa3"),
            "--attention-backend flashmla does not exist here",
        ),
        (
            (
                "--attention-backend",
                "fa3",
                "--prefill-attention-backend",
                "triton",
                "--prefill-backend",
                "flash-attn",
            ),
            "--prefill-attention-backend triton was given beside --prefill-backend flash-attn",
        ),
        *(
            ((each.flag, "deepep"), f"{each.flag} deepep does not exist here")
            for each in SGLANG_FLAGS
            if not each.is_switch
        ),
        *(((each.flag,), f"{each.flag} does not exist here") for each in SGLANG_FLAGS if each.is_switch),
        (("--nnodes", "2", "--node-rank", "1"), "--nnodes 2 does not exist here. Ranks of several machines"),
        (("--speculative-attention-mode", "prefill"), "mode prefill does not exist here"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(flags, cause):
    with pytest.raises(UserError) as error:
        config_of(*flags)
    assert cause in error.value.cause and "one of ." not in error.value.remedy
