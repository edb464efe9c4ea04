"""What a training config asks for: which settings each kind takes, the architecture that they make, and what
a target has not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_target
from tiny_mixtures import deepseek_v3_target

from eagle_kit.config.drafts import HEADS
from eagle_kit.config.drafts.fused_states import Eagle3HeadConfig
from eagle_kit.config.train import TrainConfig
from eagle_kit.config.training import FeatureNoise, RegressionConfig, TrainingConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.chat.vocab_map import VocabMap
from eagle_kit.drafts import registry
from eagle_kit.drafts.base.kind import InitContext
from eagle_kit.drafts.dflash.head import spread_layers

LLAMA = tiny_target(num_layers=12).config
DEEPSEEK = deepseek_v3_target()
ROWS = {"training.down_sample_ratio", "training.down_sample_ratio_min"}
LOSS = {"training.loss", "training.lk_eta", "training.dpace_alpha"}
EAGLE3 = {
    "head.draft_vocab_size",
    "head.vocab_map",
    "head.aux_layer_ids",
    "head.lm_head_init",
    "head.intermediate_size",
    "training.feature_noise",
}
FLAGS = {"head.fc_norm", "head.norm_output", "head.norm_before_residual", "head.norm_before_fc"}
FLAGS |= {"head.qk_norm", "head.own_embedding"}
OF_ITS_OWN = {"head.sliding_window", "head.start_from", "head.init", "training.detach_steps"}
BLOCK = {
    "head.num_layers",
    "head.mask_token_id",
    "head.block_size",
    "head.sliding_window",
    "head.start_from",
    "training.num_anchors",
}
DSPARK = {"head.markov_rank", "head.markov_head_type", "head.confidence_head", "training.confidence_weight"}
TAKEN = {
    "eagle3": EAGLE3 | FLAGS | OF_ITS_OWN | LOSS | ROWS,
    "eagle3-mla": (EAGLE3 | FLAGS | OF_ITS_OWN | LOSS | ROWS) - {"head.qk_norm", "head.sliding_window"},
    "p-eagle": (EAGLE3 | FLAGS | ROWS | LOSS | {"head.num_layers", "head.mask_token_id"})
    - {"head.norm_output", "training.dpace_alpha"}
    | {"head.sliding_window", "head.start_from"},
    "eagle1": ROWS
    | {
        "head.own_embedding",
        "head.intermediate_size",
        "head.fc_bias",
        "training.regression",
        "training.feature_noise",
    }
    | {"training.detach_steps"},
    "dflash": EAGLE3 | BLOCK | LOSS,
    "dspark": EAGLE3 | BLOCK | LOSS | DSPARK,
    "mtp": LOSS | {"head.num_modules", "head.init", "training.detach_steps"},
}
"""By value of ``head.kind``, what not every kind has."""
VALUES = {
    "head.draft_vocab_size": 60,
    "head.vocab_map": "map.pt",
    "head.aux_layer_ids": (1, 4, 5),
    "head.fc_norm": True,
    "head.norm_output": True,
    "head.norm_before_residual": True,
    "head.norm_before_fc": True,
    "head.qk_norm": True,
    "head.own_embedding": True,
    "head.lm_head_init": "random",
    "head.intermediate_size": 61,
    "head.sliding_window": 64,
    "head.fc_bias": False,
    "head.start_from": "org/draft",
    "head.num_layers": 3,
    "head.mask_token_id": 5,
    "head.block_size": 4,
    "head.markov_rank": 7,
    "head.markov_head_type": "gated",
    "head.confidence_head": False,
    "head.num_modules": 2,
    "head.init": "random",
    "training.loss": {"kl": 0.5, "ce": 0.5},
    "training.lk_eta": 2.0,
    "training.dpace_alpha": 0.5,
    "training.regression": RegressionConfig(feature_weight=2.0),
    "training.feature_noise": FeatureNoise(kind="uniform", amount=0.1),
    "training.down_sample_ratio": 0.5,
    "training.down_sample_ratio_min": 0.1,
    "training.num_anchors": 9,
    "training.confidence_weight": 0.5,
    "training.detach_steps": True,
}
NEEDED = {
    "training.lk_eta": {"training.loss": "lk-hybrid"},
    "training.down_sample_ratio_min": {"training.down_sample_ratio": 0.5},
    "head.lm_head_init": {"head.draft_vocab_size": 67},
}
"""Settings without which another one is refused."""


def train_config(kind="eagle3", *, data=None, validation=None, **values) -> TrainConfig:
    """A config with ``values`` by keys such as ``head.init``."""
    sections = {"head": {"kind": kind}, "training": {}}
    for key, value in values.items():
        section, _, field = key.partition(".")
        sections[section][field] = value
    validation = {} if validation is None else {"validation": validation}
    return TrainConfig(
        target="t", output_dir="o", data=data or {"source": "chats.jsonl"}, **sections, **validation
    )


def keys_of(kind) -> set[str]:
    """Keys of a kind's sections that not every kind has."""
    head = HEADS[kind]
    found = {f"head.{name}" for name in head.model_fields if name != "kind"}
    own = head.training_schema.model_fields.keys() - TrainingConfig.model_fields.keys()
    return found | {f"training.{name}" for name in own}


def test_every_kind_and_every_setting_is_listed_here():
    """A new kind has an entry in TAKEN, and each of its settings a value in VALUES."""
    assert TAKEN.keys() == HEADS.keys()
    assert VALUES.keys() == {key for keys in TAKEN.values() for key in keys}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_kind_takes_its_settings_and_refuses_those_of_others(kind):
    assert keys_of(kind) == TAKEN[kind]
    for key in VALUES.keys() - TAKEN[kind]:
        with pytest.raises(ValueError, match=f"{key} has no meaning for a head of the kind {kind}"):
            train_config(kind, **{key: VALUES[key]})


@pytest.mark.parametrize("kind", TAKEN)
def test_a_setting_of_the_kind_is_taken(kind):
    for key in TAKEN[kind]:
        section, _, field = key.partition(".")
        config = train_config(kind, **NEEDED.get(key, {}), **{key: VALUES[key]})
        assert getattr(getattr(config, section), field) == VALUES[key]


def new_config(kind, target=LLAMA, **head):
    if takes_size(kind):
        head = {"draft_vocab_size": 67, **head}
    return registry.training_kind(train_config(kind)).new_config(HEADS[kind](**head), target)


def takes_size(kind) -> bool:
    return kind in ("eagle3", "eagle3-mla", "p-eagle")


ARCHITECTURES = [
    ("eagle3", {"fc_norm": True}, {"fc_norm": True, "norm_output": False, "norm_before_residual": False}),
    ("eagle3", {"norm_output": True}, {"fc_norm": False, "norm_output": True}),
    ("eagle3", {"norm_before_residual": True}, {"norm_output": False, "norm_before_residual": True}),
    ("eagle3", {"sliding_window": 64}, {"sliding_window": 64, "intermediate_size": 96}),
    ("eagle3", {}, {"sliding_window": None, "aux_layer_ids": (2, 6, 9), "draft_vocab_size": 67}),
    ("eagle3", {"intermediate_size": 61}, {"intermediate_size": 61}),
    ("eagle3", {"aux_layer_ids": (0, 12)}, {"aux_layer_ids": (0, 12)}),
    ("p-eagle", {}, {"num_layers": 4, "mask_token_id": 130, "draft_vocab_size": 67}),
    ("p-eagle", {"num_layers": 2, "mask_token_id": 0}, {"num_layers": 2, "mask_token_id": 0}),
    ("p-eagle", {"fc_norm": True, "intermediate_size": 61}, {"fc_norm": True, "intermediate_size": 61}),
    ("eagle1", {}, {"fc_bias": True, "intermediate_size": 96, "vocab_size": 131}),
    ("eagle1", {"fc_bias": False, "intermediate_size": 61}, {"fc_bias": False, "intermediate_size": 61}),
    ("dflash", {}, {"num_layers": 5, "block_size": 8, "mask_token_id": 130, "draft_vocab_size": 131}),
    ("dflash", {}, {"aux_layer_ids": spread_layers(12), "sliding_window": None, "sliding_layers": ()}),
    ("dflash", {"sliding_window": 64}, {"sliding_window": 64, "sliding_layers": (0, 1, 2, 3)}),
    ("dflash", {"sliding_window": 64, "num_layers": 2}, {"num_layers": 2, "sliding_layers": (0,)}),
    ("dflash", {"intermediate_size": 61, "block_size": 4}, {"intermediate_size": 61, "block_size": 4}),
    ("dflash", {"mask_token_id": 0, "draft_vocab_size": 60}, {"mask_token_id": 0, "draft_vocab_size": 60}),
    ("dflash", {"aux_layer_ids": (0, 12)}, {"aux_layer_ids": (0, 12)}),
    ("dspark", {}, {"markov_rank": 256, "markov_form": "vanilla", "predicts_next": True}),
    ("dspark", {}, {"has_confidence": True, "confidence_reads_token": True}),
    ("dspark", {"markov_rank": 0}, {"markov_rank": 0, "confidence_reads_token": False}),
    ("dspark", {"confidence_head": False}, {"has_confidence": False, "confidence_reads_token": False}),
    ("dspark", {"markov_head_type": "rnn"}, {"markov_form": "rnn", "has_confidence": True}),
]


@pytest.mark.parametrize(("kind", "head", "fields"), ARCHITECTURES)
def test_every_setting_is_part_of_the_architecture(kind, head, fields):
    config = new_config(kind, **head)
    assert {name: getattr(config, name) for name in fields} == fields


def test_modules_are_as_many_as_asked_for_or_as_the_target_has():
    assert new_config("mtp", replace(DEEPSEEK, num_mtp_layers=0)).num_modules == 1
    assert new_config("mtp", replace(DEEPSEEK, num_mtp_layers=2)).num_modules == 2
    assert new_config("mtp", replace(DEEPSEEK, num_mtp_layers=2), num_modules=3).num_modules == 3


def test_latents_of_a_head_are_those_of_its_target():
    assert new_config("eagle3-mla", DEEPSEEK).mla == DEEPSEEK.mla
    assert new_config("eagle3", DEEPSEEK).mla is None


@pytest.mark.parametrize(
    ("kind", "head", "message"),
    [
        *((kind, {"aux_layer_ids": (0, 13)}, "aux_layer_ids is") for kind in ("eagle3", "p-eagle", "dflash")),
        *((kind, {"aux_layer_ids": (-1, 3)}, "aux_layer_ids is") for kind in ("eagle3", "dspark")),
        *((kind, {"aux_layer_ids": ()}, "aux_layer_ids") for kind in ("p-eagle", "dflash")),
        ("eagle3", {"aux_layer_ids": (), "norm_before_fc": True}, "norm captured states"),
        *((kind, {"mask_token_id": 131}, "mask_token_id is 131") for kind in ("p-eagle", "dflash", "dspark")),
        *((kind, {"draft_vocab_size": 132}, "draft_vocab_size is 132") for kind in ("eagle3", "dflash")),
        ("eagle3-mla", {}, "has no latent attention"),
        ("mtp", {}, "of the family llama"),
    ],
)
def test_what_a_target_has_not_is_refused(kind, head, message):
    with pytest.raises(ValueError, match=message):
        new_config(kind, **head)


@pytest.mark.parametrize(
    ("kind", "head", "key"),
    [
        *((kind, {"sliding_window": 64, "num_layers": 1}, "sliding_window") for kind in ("dflash", "dspark")),
        *((kind, {"lm_head_init": "random"}, "lm_head_init") for kind in ("dflash", "dspark")),
        *(("dspark", {"markov_rank": 0, "markov_head_type": form}, form) for form in ("gated", "rnn")),
    ],
)
def test_a_setting_that_another_one_leaves_without_effect_is_refused(kind, head, key):
    with pytest.raises(ValueError, match=key):
        new_config(kind, **head)


def test_shapes_of_cards_are_those_that_a_head_drafts():
    def suggested(kind, target=LLAMA, **head):
        config = new_config(kind, target, **head)
        return registry.kind_of(config).suggested_shape(config)

    assert suggested("eagle3") == suggested("eagle1") == SpecShape(5, 4, 16)
    assert suggested("p-eagle") == SpecShape(5, 1, 6)
    assert suggested("dflash", block_size=4) == SpecShape(3, 1, 4)
    assert suggested("dspark", block_size=4) == SpecShape(4, 1, 5)
    assert suggested("mtp", DEEPSEEK, num_modules=1) == SpecShape(3, 1, 4)
    assert suggested("mtp", DEEPSEEK, num_modules=2) == SpecShape(2, 1, 3)


@pytest.mark.parametrize(
    ("kind", "store", "every", "needed"),
    [
        ("eagle3", None, 0, True),
        ("eagle3", "states", 0, False),
        ("eagle3", "states", 5, True),
        ("mtp", "states", 0, True),
    ],
)
def test_a_targets_layers_are_run_where_something_needs_them(kind, store, every, needed):
    data = {"source": "chats.jsonl"} if store is None else {"store": store}
    config = train_config(kind, data=data, validation={"every": every})
    assert registry.training_kind(config).runs_target(config) is needed


def test_losses_of_parts_have_their_weights():
    own = RegressionConfig(feature_weight=2.0)
    for given, used in ((own, own), (None, RegressionConfig())):
        config = train_config("eagle1", **{"training.regression": given})
        assert config.training.learning.regression == used
        assert config.training.learning.losses == {}
    assert train_config().training.learning.regression is None
    assert train_config().training.learning.losses == {"ce": 1.0}
    config = train_config("dspark", **{"training.confidence_weight": 0.5})
    assert config.training.learning.confidence_weight == 0.5
    assert train_config("dflash").training.learning.confidence_weight == 0.0
    with pytest.raises(ValueError, match="head.confidence_head is false"):
        train_config("dspark", **{"training.confidence_weight": 0.5, "head.confidence_head": False})


def new_head(kind, target, folder=None, **head):
    settings = HEADS[kind](draft_vocab_size=67, **head)
    vocab = VocabMap(np.zeros(67, dtype=np.int64), np.arange(131) < 67, 1.0, "", "")
    found = registry.training_kind(train_config(kind))
    torch.manual_seed(1)
    start = InitContext(target, folder, vocab, torch.device("cpu"))
    return found.new_head(settings, found.new_config(settings, target.config), start)


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "dflash"])
def test_an_output_layer_begins_as_the_targets_or_at_random(kind):
    target = tiny_target(num_layers=12)
    copied, fresh = (new_head(kind, target, lm_head_init=init) for init in ("target", "random"))
    assert torch.equal(copied.output.weight, target.head_weight[:67])
    assert not torch.isclose(fresh.output.weight, target.head_weight[:67]).any(1).any()
    soft = torch.allclose(copied.norm.weight, 0.1 * target.norm.weight)
    assert soft and (kind == "dflash" or (fresh.norm.weight == 1).all())


@pytest.mark.parametrize("scale", [0.02, 1.0, 54.0, 4000.0])
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "dflash"])
def test_a_new_head_begins_near_the_loss_of_guessing_whatever_the_scale_of_the_norm(kind, scale):
    target = tiny_target(num_layers=12)
    with torch.no_grad():
        target.norm.weight.mul_(scale)
        target.lm_head.weight.normal_()
    head = new_head(kind, target)
    states = torch.randn(401, target.config.hidden_size)
    logits = head.output(head.norm(states))
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(401) % 67)
    assert abs(loss.item() - np.log(67)) < 0.2


@pytest.mark.parametrize("num_tokens", [120, 131, 140])
def test_a_tokenizer_may_have_fewer_or_more_tokens_than_the_target_has_rows(num_tokens):
    target = tiny_target(num_layers=12)
    vocab = VocabMap(np.zeros(67, dtype=np.int64), np.arange(num_tokens) < 67, 1.0, "", "")
    settings = Eagle3HeadConfig(draft_vocab_size=67)
    found = registry.training_kind(train_config("eagle3"))
    start = InitContext(target, None, vocab, torch.device("cpu"))
    head = found.new_head(settings, found.new_config(settings, target.config), start)
    assert torch.equal(head.output.weight, target.head_weight[:67])


def test_a_draft_vocabulary_of_a_token_without_a_row_is_refused():
    offsets = np.array([0] * 66 + [139 - 66])
    tokens = np.arange(140) < 66
    tokens[139] = True
    vocab = VocabMap(offsets, tokens, 1.0, "", "")
    settings = Eagle3HeadConfig(draft_vocab_size=67)
    found = registry.training_kind(train_config("eagle3"))
    target = tiny_target(num_layers=12)
    start = InitContext(target, None, vocab, torch.device("cpu"))
    with pytest.raises(UserError, match="token 139"):
        found.new_head(settings, found.new_config(settings, target.config), start)


def test_the_masks_embedding_begins_as_the_mean():
    target = tiny_target(num_layers=12)
    head = new_head("p-eagle", target)
    torch.testing.assert_close(head.mask_embedding, target.embed_tokens.weight.mean(0))
