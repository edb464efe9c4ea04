"""A config.json of a draft with any value in any field: it is read, or refused in a sentence."""

import json
from dataclasses import replace

import pytest
from hostile import with_one_other_value
from tiny import tiny_head, tiny_target
from tiny_mixtures import deepseek_v3_target

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files.draft import DraftFolder, save_draft
from eagle_kit.drafts.files.findings import check_fit
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead

TARGET = tiny_target(num_layers=12)
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}
LEFT_OUT = ("use_aux_norm", "norm_before_fc", "bias", "qkv_bias", "quantization_config", "eos_token_id")
"""Keys that drafts of others have."""


def heads():
    deepseek = deepseek_v3_target()
    sizes = {"hidden_size": 48, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 96}
    rest = {"vocab_size": 131, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None}
    return {
        "eagle3": tiny_head(TARGET, rope_scaling=ROPE),
        "eagle3-mla": Eagle3Head(Eagle3Config.for_target(deepseek, 67, latent=True)),
        "eagle1": Eagle1Head(Eagle1Config(**sizes, **rest, fc_bias=False)),
        "mtp": MTPHead(MTPConfig(replace(deepseek, num_mtp_layers=1))),
    }


def speculators(config):
    """A flat config of ours as the speculators project nests it."""
    layer = {key: config[key] for key in config if key not in ("architectures", "eagle_config", "eagle_kit")}
    flags = {"norm_before_residual": False, "fc_norm": False, "draft_vocab_size": config["draft_vocab_size"]}
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    own = {"extra": {"dtype": "float32"}, "format": "speculators"}
    about = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": ids, "eagle_kit": own}
    return {**about, **flags, "transformer_layer_config": layer, "architectures": ["Eagle3DraftModel"]}


@pytest.mark.parametrize("kind", ["eagle3", "speculators", "eagle3-mla", "eagle1", "mtp"])
def test_a_hostile_value_of_any_field_is_refused_or_read(kind, tmp_path):
    folder = tmp_path / "draft"
    save_draft(heads()["eagle3" if kind == "speculators" else kind], folder, metadata={})
    whole = {**dict.fromkeys(LEFT_OUT), **json.loads((folder / "config.json").read_text())}
    whole = speculators(whole) if kind == "speculators" else whole
    num_refused = num_read = 0
    for key, value, config in with_one_other_value(whole):
        (folder / "config.json").write_text(json.dumps(config))
        try:
            draft = DraftFolder.open(folder)
            read = draft.head_kind.read_config(draft.files, TARGET.config)
            assert draft.layout.kind is draft.kind
            check_fit(read, TARGET.config)
            num_read += 1
        except UserError as error:
            num_refused += 1
            assert "\n" not in error.cause and len(error.cause) < 500, (key, value)
    assert num_refused > 200 and num_read + num_refused > 500


@pytest.mark.parametrize("value", [-5, 0, 1.5, "48", True, 10**12, None, [48]])
def test_a_wrong_hidden_size_is_named(value, tmp_path):
    save_draft(heads()["eagle3"], tmp_path / "draft", metadata={})
    path = tmp_path / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": value}))
    draft = DraftFolder.open(tmp_path / "draft")
    with pytest.raises(UserError, match="has no 'hidden_size'" if value is None else "says hidden_size"):
        draft.head_kind.read_config(draft.files)


@pytest.mark.parametrize("layer", [-1, 13])
def test_a_layer_that_the_target_has_not_is_refused(layer):
    head = tiny_head(TARGET, aux_layer_ids=(2, 6, layer))
    with pytest.raises(UserError, match="reads the inputs of layers"):
        check_fit(head.config, TARGET.config)
