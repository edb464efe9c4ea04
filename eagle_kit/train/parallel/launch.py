"""Environment that ``torchrun``, ``deepspeed`` or ``accelerate launch`` gives, and settings that are refused.

``torchrun`` starts processes on CPUs and GPUs, and so does ``accelerate launch`` with ``--multi_gpu`` or a
file of several processes, which says how they share the head. Without these, or with ``--cpu``, it starts one
process, however many were asked for.
"""

from collections.abc import Mapping

from eagle_kit.config.train import TrainingConfig
from eagle_kit.core.errors import UserError

UNUSED_FLAGS = {
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config",
}
"""Variables of accelerate's launcher, and the flags without effect here that set them."""
FIXED_SETTINGS = {
    "ACCELERATE_USE_FSDP": {
        "FSDP_VERSION": ("fsdp_version", ("2",), "Set it to 2."),
        "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", ("false",), "Set it to false."),
        "FSDP_RESHARD_AFTER_FORWARD": (
            "fsdp_reshard_after_forward",
            ("true", "full_shard"),
            "Set it to true.",
        ),
        "FSDP_ACTIVATION_CHECKPOINTING": (
            "fsdp_activation_checkpointing",
            ("false",),
            "Set it to false, and training.gradient_checkpointing=steps in the run's own config.",
        ),
    },
    "ACCELERATE_USE_DEEPSPEED": {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": (
            "deepspeed_config_file",
            ("none",),
            "Write zero_stage into accelerate's file instead.",
        ),
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", ("2", "3"), "Set it to 2 or 3."),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
            "offload_optimizer_device",
            ("none",),
            "Set it to none.",
        ),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param_device", ("none",), "Set it to none."),
        "ACCELERATE_GRADIENT_CLIPPING": (
            "gradient_clipping",
            ("none", "auto"),
            "Leave it out, and set training.clip_norm in the run's own config.",
        ),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
            "gradient_accumulation_steps",
            ("1", "auto"),
            "Leave it out, and set training.gradient_accumulation in the run's own config.",
        ),
    },
}
"""By kind of launch: variable -> setting of the launcher, values with an effect here, remedy."""
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Variables with the number of this process among all, in the order in which accelerate looks."""


def check_launcher(environ: Mapping[str, str], training: TrainingConfig) -> None:
    """Refuse flags of ``accelerate launch``, or of its config file, that would have no effect.

    Args:
        environ: of this process, where the launcher leaves what it was asked for.

    Raises:
        UserError: sharding of a kind that we do not do, compilation, a precision other than
            ``training.precision``, or several processes, of which accelerate starts one.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in environ
    if launched and "MASTER_ADDR" in environ and not set(RANKS) & set(environ):
        raise UserError(
            "accelerate was launched for several processes, and has started one, which knows no other.",
            "Launch with --multi_gpu or train/accelerate/multi-gpu.yaml, on CPUs too and without --cpu, or "
            "with torchrun --nproc_per_node N -m eagle_kit.cli train CONFIG.",
        )
    for variable, flag in UNUSED_FLAGS.items():
        if _is_set(environ, variable):
            raise UserError(
                f"accelerate was launched with {flag}, which has no effect here.",
                f"Launch without {flag}.",
            )
    for launch, settings in FIXED_SETTINGS.items():
        if not _is_set(environ, launch):
            continue
        for variable, (name, allowed, remedy) in settings.items():
            value = environ.get(variable, allowed[0]).lower()
            if value not in allowed:
                raise UserError(f"accelerate was launched with {name} {value}, which has no effect.", remedy)
    if (backend := environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()) not in ("", "no"):
        raise UserError(
            f"accelerate was launched with --dynamo_backend {backend}, but the head is not compiled.",
            "Launch without --dynamo_backend.",
        )
    asked, ours = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(), training.precision
    if asked not in ("", "no") and (asked, ours) not in (("bf16", "bfloat16"), ("bf16", "auto")):
        wanted = "Set training.precision=bfloat16, or launch" if asked == "bf16" else "Launch"
        raise UserError(
            f"accelerate was launched with --mixed_precision {asked}, but training.precision is {ours}.",
            f"{wanted} with --mixed_precision no.",
        )


def check_local_rank(local_rank: int | None, environ: Mapping[str, str]) -> None:
    """Refuse a ``--local_rank`` that contradicts the environment, which is what is read.

    Args:
        local_rank: that DeepSpeed's launcher adds to the command; None without it.

    Raises:
        UserError: ``LOCAL_RANK`` is not set, or is another one.
    """
    if local_rank is None:
        return
    known = environ.get("LOCAL_RANK")
    if known != str(local_rank):
        is_what = "is not set" if known is None else f"is {known}"
        raise UserError(
            f"--local_rank is {local_rank}, and the variable LOCAL_RANK {is_what}.",
            "Leave --local_rank to the launcher: deepspeed, torchrun or accelerate launch.",
        )


def sharding_asked_for(environ: Mapping[str, str]) -> str:
    """Sharding of the head that the launcher asks for: ``"none"`` (every process has all of it), ``"fsdp2"``,
    ``"zero2"`` or ``"zero3"``; of one process always ``"none"``."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return "none"
    if _is_set(environ, "ACCELERATE_USE_FSDP"):
        return "fsdp2"
    if _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return f"zero{environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    return "none"


def is_main(environ: Mapping[str, str]) -> bool:
    """True in the first of all processes, the one that writes."""
    return next((environ[name] for name in RANKS if name in environ), "0") == "0"


def go_on(command: str, environ: Mapping[str, str]) -> str:
    """Sentence with the command that goes on with a stopped one, in as many processes."""
    count = environ.get("WORLD_SIZE", "1")
    return f"Go on with: {command}" + (f" (in {count} processes, as now)" if count != "1" else "")


def _is_set(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "").lower() in ("true", "1")
