"""Optimisers of a head: AdamW, or Muon for its matrices and AdamW for the rest, both of torch.

Muon (https://kellerjordan.github.io/posts/muon; arXiv 2502.16982) steps along the momentum of a matrix made
orthogonal. It is for matrices between hidden states; embeddings, output layers, norms and stacks of experts
are AdamW's. Its update is scaled to the size that AdamW's has (0.2 sqrt(max(rows, columns))), so one learning
rate serves both. Query, key and value lie in one matrix here, and so do gate and up; each such matrix is made
orthogonal as a whole. That takes about as much arithmetic as a row of data, so processes share the matrices.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagle_kit.config.train import TrainingConfig
from eagle_kit.models.draft_head import DraftHead

LEARNING_RATE_RATIO = "learning_rate_ratio"
"""Key of a parameter group: its learning rate as a multiple of the schedule's; 1 where it is missing."""


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimiser, with one state and one list of parameter groups.

    Of several processes, each with all weights and the same gradients, one owns each matrix: it has the
    momentum, makes the step, and sends the others the new weights.

    Args:
        muon, adamw: two optimisers over different parameters; they are taken over. Muon has one group.
        process: number of this process, and how many there are.
    """

    def __init__(
        self, muon: torch.optim.Muon, adamw: torch.optim.AdamW, process: tuple[int, int] = (0, 1)
    ) -> None:
        self._parts = (muon, adamw)
        self._process, self._num_processes = process
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()
        self._owners = _owners([p.shape for p in self._matrices], self._num_processes)

    @property
    def _matrices(self) -> list[torch.Tensor]:
        matrices: list[torch.Tensor] = self._parts[0].param_groups[0]["params"]
        return matrices

    def _share(self) -> None:
        """Let both parts work on this optimiser's groups and moments."""
        first = len(self._parts[0].param_groups)
        for part, groups in zip(
            self._parts, (self.param_groups[:first], self.param_groups[first:]), strict=True
        ):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`torch.optim.Optimizer`."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both; there is no ``closure``."""
        assert closure is None
        muon, adamw = self._parts
        (group,), matrices = muon.param_groups, self._matrices
        group["params"] = [
            p for p, owner in zip(matrices, self._owners, strict=True) if owner == self._process
        ]
        try:
            muon.step()
        finally:
            group["params"] = matrices
        self._send(matrices)
        adamw.step()

    def whole_state_dict(self) -> dict[str, Any]:
        """The ``state_dict`` of a single process; all processes call it."""
        if self.state:  # AdamW has some from the first step on
            self._send(
                [self.state[p].setdefault("momentum_buffer", torch.empty_like(p)) for p in self._matrices]
            )
        state = self.state_dict()
        for matrix, owner in zip(self._matrices, self._owners, strict=True):
            if owner != self._process:
                self.state.pop(matrix, None)
        return state

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Let every process have the owner's numbers of each matrix, in place."""
        if self._num_processes == 1:
            return
        sent = zip(tensors, self._owners, strict=True)
        waiting = [torch.distributed.broadcast(each.detach(), owner, async_op=True) for each, owner in sent]
        for work in waiting:
            work.wait()


def _owners(shapes: Sequence[torch.Size], num_processes: int) -> list[int]:
    """The process that owns each matrix, so that all have about the same arithmetic."""
    load, owners = [0] * num_processes, [0] * len(shapes)
    work = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]  # of an iteration, halved
    for number in sorted(range(len(shapes)), key=work.__getitem__, reverse=True):
        owners[number] = load.index(min(load))
        load[owners[number]] += work[number]
    return owners


def make_optimizer(
    head: DraftHead, training: TrainingConfig, process: tuple[int, int] = (0, 1)
) -> torch.optim.Optimizer:
    """The optimiser of what is trained, with weight decay on matrices only; ``process``: number of this one
    among the processes that have the whole head, and how many they are."""
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    decay = training.weight_decay
    if training.optimizer == "adamw":
        matrices, vectors = _by_shape(list(trained.values()))
        return _adamw(matrices, vectors, training)
    tables = [module.weight for module in head.modules() if isinstance(module, torch.nn.Embedding)]
    outside = {id(p) for p in (*head.output_weights, *tables)}
    inner = [p for p in trained.values() if p.ndim == 2 and id(p) not in outside]
    mine = {id(p) for p in inner}
    matrices, vectors = _by_shape([p for p in trained.values() if id(p) not in mine])
    muon = torch.optim.Muon(
        [{"params": inner, LEARNING_RATE_RATIO: training.muon_learning_rate_ratio}],
        lr=training.learning_rate,
        weight_decay=decay,
        momentum=training.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonAdamW(muon, _adamw(matrices, vectors, training), process)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the schedule's ``rate`` times its own ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(LEARNING_RATE_RATIO, 1.0)


def optimizer_name(param_groups: Any) -> str:
    """``adamw`` or ``muon``, from the parameter groups of an optimiser or of its state."""
    return "muon" if any("ns_steps" in group for group in param_groups) else "adamw"


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless every moment has the size of its weight; KeyError when one is missing."""
    for group in optimizer.param_groups:
        names = ("momentum_buffer",) if "ns_steps" in group else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            moments: Mapping[str, Any] = optimizer.state.get(parameter, {})
            if moments and any(moments[name].shape != parameter.shape for name in names):
                raise ValueError("its moments have the sizes of another head")


def _by_shape(parameters: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Matrices (and stacks of them), and vectors."""
    return [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]


def _adamw(
    matrices: list[torch.Tensor], vectors: list[torch.Tensor], training: TrainingConfig
) -> torch.optim.AdamW:
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True
    )
