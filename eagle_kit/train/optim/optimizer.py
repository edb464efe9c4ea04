"""Optimisers of a head: AdamW, or Muon for its matrices and AdamW for the rest, both of torch.

Muon (https://kellerjordan.github.io/posts/muon; arXiv 2502.16982) steps along the momentum of a matrix, made
orthogonal. It trains matrices between hidden states; AdamW trains embeddings, output layers, norms and
stacks of experts. Muon's update is scaled to the size of AdamW's (0.2 sqrt(max(rows, columns))), so one
learning rate serves both. Query, key and value are one matrix here, and so are gate and up; each such matrix
is made orthogonal as a whole. That takes about as much arithmetic as a packed sequence, so processes share
the matrices.
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

    Processes with all weights and the same gradients share the work: each matrix has an owner, which has its
    momentum, makes its step, and sends the new weights to the others.

    Args:
        muon: optimiser of the matrices, with one parameter group; it is changed.
        adamw: optimiser of the other weights; it is changed.
        process: number of this process, and number of processes.
    """

    def __init__(
        self, muon: torch.optim.Muon, adamw: torch.optim.AdamW, process: tuple[int, int] = (0, 1)
    ) -> None:
        self._muon = muon
        self._adamw = adamw
        self._process, self._num_processes = process
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share_state()
        self._owners = _choose_owners([p.shape for p in self._matrices], self._num_processes)

    @property
    def _matrices(self) -> list[torch.Tensor]:
        """Weights that Muon trains."""
        matrices: list[torch.Tensor] = self._muon.param_groups[0]["params"]
        return matrices

    def _share_state(self) -> None:
        """Let Muon and AdamW use this optimiser's parameter groups and state."""
        num_muon_groups = len(self._muon.param_groups)
        self._muon.param_groups = self.param_groups[:num_muon_groups]
        self._muon.state = self.state
        self._adamw.param_groups = self.param_groups[num_muon_groups:]
        self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`torch.optim.Optimizer`."""
        super().load_state_dict(state_dict)
        self._share_state()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step of both optimisers. A ``closure`` is not supported."""
        assert closure is None

        # Muon, over the matrices that this process owns.
        (group,) = self._muon.param_groups
        matrices = self._matrices
        group["params"] = self._owned(matrices)
        try:
            self._muon.step()
        finally:
            group["params"] = matrices
        self._send_from_owners(matrices)

        # AdamW.
        self._adamw.step()

    def whole_state_dict(self) -> dict[str, Any]:
        """The ``state_dict`` that a single process would have. All processes call it."""
        # Gather the momenta. Before the first step there is no state.
        if self.state:
            momenta = []
            for matrix in self._matrices:
                momentum = self.state[matrix].setdefault("momentum_buffer", torch.empty_like(matrix))
                momenta.append(momentum)
            self._send_from_owners(momenta)
        state = self.state_dict()

        # Remove those of other owners again.
        for matrix, owner in zip(self._matrices, self._owners, strict=True):
            if owner != self._process:
                self.state.pop(matrix, None)
        return state

    def _owned(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Matrices that this process owns."""
        owned = []
        for matrix, owner in zip(matrices, self._owners, strict=True):
            if owner == self._process:
                owned.append(matrix)
        return owned

    def _send_from_owners(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensor of each matrix from its owner to the other processes, in place."""
        if self._num_processes == 1:
            return
        works = []
        for tensor, owner in zip(tensors, self._owners, strict=True):
            works.append(torch.distributed.broadcast(tensor.detach(), owner, async_op=True))
        for work in works:
            work.wait()


def _choose_owners(shapes: Sequence[torch.Size], num_processes: int) -> list[int]:
    """Choose the process that owns each matrix, so that all processes have about the same arithmetic."""
    # Half the operations of one iteration that makes a matrix orthogonal.
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]

    # From the largest matrix on, each goes to the process that has the least.
    loads = [0] * num_processes
    owners = [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=costs.__getitem__, reverse=True):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners


def make_optimizer(
    head: DraftHead, training: TrainingConfig, process: tuple[int, int] = (0, 1)
) -> torch.optim.Optimizer:
    """Make the optimiser of the trained weights, with weight decay on matrices only.

    Args:
        process: number of this process among those that have the whole head, and number of these processes.
    """
    trained = [p for p in head.parameters() if p.requires_grad]
    if training.optimizer == "adamw":
        return _adamw(trained, training)

    # Muon trains matrices between hidden states: neither embeddings nor the output layer.
    embeddings = [module.weight for module in head.modules() if isinstance(module, torch.nn.Embedding)]
    outside = {id(p) for p in (*head.output_weights, *embeddings)}
    inner = [p for p in trained if p.ndim == 2 and id(p) not in outside]
    muon = torch.optim.Muon(
        [{"params": inner, LEARNING_RATE_RATIO: training.muon_learning_rate_ratio}],
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        momentum=training.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )

    # AdamW trains the rest.
    inner_ids = {id(p) for p in inner}
    others = [p for p in trained if id(p) not in inner_ids]
    return MuonAdamW(muon, _adamw(others, training), process)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group to ``rate`` times the group's ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(LEARNING_RATE_RATIO, 1.0)


def optimizer_name(param_groups: Any) -> str:
    """Name of an optimiser, ``adamw`` or ``muon``, by the parameter groups of it or of its state."""
    is_muon = any("ns_steps" in group for group in param_groups)
    return "muon" if is_muon else "adamw"


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Check the moments of an optimiser.

    Raises:
        ValueError: a moment has not the shape of its weight.
        KeyError: a moment is missing.
    """
    for group in optimizer.param_groups:
        names = ("momentum_buffer",) if "ns_steps" in group else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            moments: Mapping[str, Any] = optimizer.state.get(parameter, {})
            if moments and any(moments[name].shape != parameter.shape for name in names):
                raise ValueError("its moments have the sizes of another head")


def _adamw(parameters: Sequence[torch.Tensor], training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices (and stacks of them), and none on vectors."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True
    )
