"""speculators trains heads on a CPU, and their forward drafts with them.

Run by the python of its environment, without eagle_kit.

Its argument is a file of JSON: ``stages``, ``target``, ``prompts`` (ids), ``out``, and what the stages need:
``data`` a folder ``data`` and ``num_tokens``; ``train`` their ``options`` and the folder ``checkpoints``;
``draft`` the ``responses``, a file ``logits``, and a ``head`` where none was trained before. It writes
``out``.
"""

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LOGITS_EVERY = 11
"""Distance of the tokens of the first response behind which logits are written."""


def module(name: str) -> Any:
    """A module of this environment."""
    return importlib.import_module(name)


# --- The target ------------------------------------------------------------------------------------------


class Target:
    """The target in transformers: greedy responses and the states that heads read."""

    def __init__(self, folder: str) -> None:
        self.model = module("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]

    @torch.no_grad()
    def response(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The greedy response to a prompt, with the token that ends it."""
        ids = torch.tensor([prompt])
        given = {"do_sample": False, "max_new_tokens": num_tokens}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def states(self, ids: list[int], layers: list[int]) -> torch.Tensor:
        """Inputs of ``layers`` and, last, what the final norm reads: ``[T, layers + 1, H]``."""
        last: list[torch.Tensor] = []
        handle = self.model.model.norm.register_forward_pre_hook(lambda norm, args: last.append(args[0][0]))
        out = self.model.model(torch.tensor([ids]), output_hidden_states=True)
        handle.remove()
        return torch.stack([*(out.hidden_states[layer][0] for layer in layers), last[0]], 1)

    def fused(self, ids: list[int], layers: list[int]) -> torch.Tensor:
        """Inputs of ``layers`` side by side: ``[T, layers * H]``."""
        return self.states(ids, layers)[:, :-1].flatten(1).contiguous()


# --- Training --------------------------------------------------------------------------------------------


def write_data(job: dict[str, Any]) -> dict[str, Any]:
    """The target's greedy responses, as their trainer reads texts: a saved data set beside
    ``hs_{row}.safetensors``."""
    target = Target(job["target"])
    num_layers = target.model.config.num_hidden_layers
    layers = [2, num_layers // 2, num_layers - 3]
    folder = Path(job["data"])
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    responses = []
    for number, prompt in enumerate(job["prompts"]):
        response = target.response(prompt, job["num_tokens"])
        ids = prompt + response
        responses.append(response)
        rows["input_ids"].append(ids)
        rows["loss_mask"].append([0] * len(prompt) + [1] * len(response))
        rows["seq_len"].append(len(ids))
        payload = {
            "hidden_states": target.states(ids, layers).to(torch.bfloat16),
            "token_ids": torch.tensor(ids),
        }
        save_file(payload, folder / "hidden_states" / f"hs_{number}.safetensors")
    module("datasets").Dataset.from_dict(rows).with_format("torch").save_to_disk(folder)
    return {"responses": responses}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Their command line, in this process: their trainer asks for an accelerator and is given the CPU."""
    trainer = module("speculators.train.trainer")
    set_up = trainer.Trainer.setup_trainer

    def on_cpu(self: Any) -> None:
        self.device_type = "cpu"
        self.local_rank = "cpu"
        set_up(self)

    trainer.Trainer.setup_trainer = on_cpu
    torch.accelerator.synchronize = lambda *args: None
    cli = module("speculators.train.cli")
    cli.main(module("speculators.train.config").TrainConfig.resolve(job["options"]))
    newest = max(int(path.name) for path in Path(job["checkpoints"]).iterdir() if path.name.isdigit())
    head = Path(job["checkpoints"]) / str(newest)
    state = json.loads((head / "training_state.json").read_text(encoding="utf-8"))
    return {"head": str(head), "steps": state["global_step"]}


# --- Their forward ---------------------------------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of another value inside the ``with``."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def hooked(layer: torch.nn.Module, rows: slice, seen: list[torch.Tensor]) -> Iterator[None]:
    """Inside the ``with``, ``layer`` reads only ``rows`` of its input; outputs ``[rows, Vd]`` are kept."""
    handles = [
        layer.register_forward_pre_hook(lambda layer, args: (args[0][:, rows],)),
        layer.register_forward_hook(lambda layer, args, out: seen.append(out[0].clone())),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Drafter:
    """Their model of one kind, with the head's weights in fp32 and the options of its own config."""

    def __init__(self, folder: str) -> None:
        model_class = module("speculators").SpeculatorModel
        model_class.registered_classes()
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self.kind: str = raw["speculators_model_type"]
        config = model_class.registry[self.kind].config_class.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        self.model = model_class.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        proposal = config.speculators_config.proposal_methods[0]
        self.num_drafts: int = proposal.speculative_tokens
        self.layers: list[int] = list(self.model.target_layer_ids)
        self.seen: list[torch.Tensor] = []

    @torch.no_grad()
    def logits(self, states: torch.Tensor, ids: list[int], following: list[int]) -> torch.Tensor:
        """Logits of drafts behind ``ids``, by their forward: ``[len(following) + 1 or more, Vd]``.

        Args:
            states: ``[T - 1, layers * H]``, those of all tokens of ``ids`` but the last.
            ids: the tokens that are known.
            following: the drafts whose logits are known.
        """
        self.seen.clear()
        made = {"eagle3": self._eagle3, "peagle": self._p_eagle, "dflash": self._block, "dspark": self._block}
        return made[self.kind](states, ids, following)

    def draft(self, states: torch.Tensor, ids: list[int], num_drafts: int) -> list[int]:
        """Greedy drafts behind ``ids``. Those of EAGLE-3 and DSpark read the ones before."""
        tokens: list[int] = []
        while len(tokens) < num_drafts:
            rows = self.logits(states, ids, tokens)
            if self.kind in ("eagle3", "dspark"):
                rows = rows[: len(tokens) + 1]
            best = rows.argmax(-1)
            if self.model.d2t is not None:
                best = best + self.model.d2t[best]
            tokens = [*tokens, *best.tolist()[len(tokens) :]]
        return tokens[:num_drafts]

    def _eagle3(self, states: torch.Tensor, ids: list[int], following: list[int]) -> torch.Tensor:
        """A step more than ``following`` has tokens. Row i of step s reads token i + 1 + s, and rows behind
        the last known one, which it does not see, hold what it reads next."""
        given = torch.tensor([ids[1:] + following])
        padded = torch.nn.functional.pad(states, (0, 0, 0, len(following)))
        row = slice(len(ids) - 2, len(ids) - 1)
        with hooked(self.model.lm_head, row, self.seen):
            documents = torch.zeros_like(given)
            self.model(padded[None], given, documents, ttt_steps=len(following) + 1)
        return torch.cat(self.seen)

    def _p_eagle(self, states: torch.Tensor, ids: list[int], following: list[int]) -> torch.Tensor:
        """Rows are those of the known tokens, and masks of all depths behind the last of them."""
        depths = self.num_drafts
        given = torch.tensor([ids[1:] + [0] * depths])
        padded = torch.nn.functional.pad(states, (0, 0, 0, depths))
        last = len(ids) - 2
        anchors = torch.tensor([*range(last + 1), *([last] * (depths - 1))])
        depth = torch.tensor([0] * (last + 1) + list(range(1, depths)))
        core = module("speculators.models.peagle.core")
        with (
            replaced(core, "generate_cod_sample_indices", lambda **options: (anchors, depth)),
            replaced(core, "compute_metrics", lambda **options: (None, {})),
            hooked(self.model.lm_head, slice(last, None), self.seen),
        ):
            self.model(
                padded[None],
                given,
                torch.zeros_like(given),
                verifier_last_hidden_states=padded[None, :, : self.model.hidden_size],
            )
        return self.seen[0]

    def _block(self, states: torch.Tensor, ids: list[int], following: list[int]) -> torch.Tensor:
        """One block, whose anchor is the last known token; DSpark corrects its rows by ``following``."""
        size = self.model.block_size
        padding = [0] * (size - len(following))
        given = torch.tensor([ids + following + padding])
        padded = torch.nn.functional.pad(states, (0, 0, 0, given.shape[1] - len(states)))
        anchor = torch.tensor([len(ids) - 1])
        found: list[torch.Tensor] = []

        def keep(logits: torch.Tensor, *others: Any, **options: Any) -> tuple[None, dict[str, Any]]:
            found.append(logits[0].clone())
            return None, {}

        with (
            replaced(
                module("speculators.models.dflash.core"), "select_anchors", lambda *a: (anchor, anchor >= 0)
            ),
            replaced(module(f"speculators.models.{self.kind}.core"), "compute_metrics", keep),
        ):
            self.model(
                padded[None],
                given,
                torch.ones_like(given),
                padded[None, :, : self.model.hidden_size],
                torch.zeros_like(given),
                max_anchors=1,
            )
        first = 0 if self.model.config.sample_from_anchor else 1
        return found[0][first:]


def draft(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy decoding with their drafts, and their logits behind some tokens of the first response.

    A draft is accepted while it is the target's own greedy token. Counts are those of ``SpecStats``.
    """
    target = Target(job["target"])
    drafter = Drafter(job["head"])
    num_drafts = drafter.num_drafts
    accepted = [0] * num_drafts
    num_verifies = 0
    for prompt, response in zip(job["prompts"], job["responses"], strict=True):
        ids = prompt + response
        states = target.fused(ids, drafter.layers)
        known = len(prompt) + 1
        while known < len(ids):
            drafts = drafter.draft(states[: known - 1], ids[:known], num_drafts)
            num_verifies += 1
            right = 0
            while right < num_drafts and known + right < len(ids) and drafts[right] == ids[known + right]:
                accepted[right] += 1
                right += 1
            known += right + 1

    # Logits behind some tokens, with the target's own tokens as the drafts before.
    ids = job["prompts"][0] + job["responses"][0]
    states = target.fused(ids, drafter.layers)
    places = list(range(len(job["prompts"][0]) + 1, len(ids) - num_drafts, LOGITS_EVERY))
    rows = []
    for place in places:
        following = ids[place : place + num_drafts - 1]
        rows.append(drafter.logits(states[: place - 1], ids[:place], following)[:num_drafts])
    tensors = {"states": states, "ids": torch.tensor(ids), "places": torch.tensor(places)}
    save_file({**tensors, "logits": torch.stack(rows)}, job["logits"])
    return {
        "num_drafts": num_verifies,
        "accepted": accepted,
        "speculative_tokens": num_drafts,
        "logits": job["logits"],
        "versions": {
            name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")
        },
    }


def main() -> None:
    """Run a stage and write its result."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    stages: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "data": write_data,
        "train": train,
        "draft": draft,
    }
    result: dict[str, Any] = {}
    for stage in job["stages"]:
        result |= stages[stage]({**job, **result})
    Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
