"""Every registered kind of head, and one that a test adds with one line, through every room that asks."""

import builtins
import inspect
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_mixtures import YARN
from tiny_mtp import save_target
from tiny_run import make_config
from toy_kind import ToyHead, ToyHeadConfig, ToyKind, ToyTrainConfig

from eagle_kit.config import drafts
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.vocab_map import VocabMap
from eagle_kit.drafts import registry
from eagle_kit.drafts.base.kind import HeadKind, InitContext
from eagle_kit.drafts.files.draft import DraftFolder, load_draft, save_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.files.export import export_draft
from eagle_kit.drafts.files.formats import refuse
from eagle_kit.drafts.files.validate import validate_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.models.loading.loader import load_target
from eagle_kit.train.__main__ import main as train
from eagle_kit.train.plan.sizes import head_sizes

GREEDY = SamplingParams(max_tokens=12)
TOY = ToyKind()
HEADS = [*registry.head_kinds(), TOY]
CONFIGS = {**drafts.HEADS, "toy": ToyHeadConfig}


@pytest.fixture(autouse=True)
def with_toy(monkeypatch):
    """The one line that adds a kind."""
    monkeypatch.setattr(registry, "KINDS", (TOY, *registry.KINDS))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target that every kind has a head for."""
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    save_target(folder, vocab_size=131, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})
    return folder, load_target(folder)


def fresh(kind: HeadKind, target):
    """A new head, as a run would begin with it."""
    folder, model = target
    schema = CONFIGS[kind.trained_as[0]]
    chosen = {"draft_vocab_size": 67} if "draft_vocab_size" in schema.model_fields else {}
    settings = schema(**chosen)
    torch.manual_seed(1)
    sayable = np.arange(131) < 67
    vocab = VocabMap(np.zeros(67, dtype=np.int64), sayable, 1.0, "", "")
    config = replace(kind.new_config(settings, model.config), target="tiny")
    return kind.new_head(settings, config, InitContext(model, folder, vocab, torch.device("cpu")))


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.name)
def test_a_kind_sets_every_attribute_without_a_default(kind):
    required = ("name", "title", "algorithms", "trained_as", "config_class", "head_class")
    missing = [attribute for attribute in required if not getattr(kind, attribute, None)]
    assert not missing


@pytest.mark.parametrize("attribute", ["name", "title", "algorithm", "config_class"])
def test_no_two_kinds_are_found_by_the_same_value(attribute):
    values = [getattr(kind, attribute) for kind in HEADS]
    assert len(values) == len(set(values)), values


def test_a_kind_needs_its_abstract_methods_only():
    """The toy, which every other case of this file runs, defines exactly these."""
    defined = {name for name, member in vars(ToyKind).items() if inspect.isfunction(member)}
    assert defined == HeadKind.__abstractmethods__


def test_the_tag_of_a_section_is_the_kind_that_its_model_names():
    assert [schema().kind for schema in drafts.HEADS.values()] == list(drafts.HEADS)


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.name)
def test_a_new_head_is_saved_found_and_loaded_to_the_bit(kind, target, tmp_path):
    head = fresh(kind, target)
    assert any(parameter.requires_grad for parameter in head.parameters())
    save_draft(head, tmp_path / "draft", metadata={})
    assert DraftFolder.open(tmp_path / "draft").kind is registry.kind_of(head.config) is kind
    loaded = load_draft(tmp_path / "draft", target=target[1])
    assert type(loaded) is kind.head_class and loaded.config.target == "tiny"
    assert kind.write_config(loaded.config) == kind.write_config(head.config)
    found = dict(loaded.named_parameters())
    for name, parameter in head.named_parameters():
        assert torch.equal(found.pop(name), parameter), name
        assert loaded.get_parameter(name).requires_grad == parameter.requires_grad
    assert not found


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.name)
def test_a_head_is_checked_and_exported_with_a_card(kind, target, tmp_path):
    save_draft(fresh(kind, target), tmp_path / "draft", metadata={})
    findings = validate_draft(tmp_path / "draft", target[0])
    assert {"layout", "hidden size", "vocabulary", "rope", "weights"} <= {f.subject for f in findings}
    assert not [finding for finding in findings if finding.level == "error"]
    export_draft(tmp_path / "draft", tmp_path / "out", target=target[0])
    card = (tmp_path / "out" / "README.md").read_text()
    config = kind.read_config(open_draft(tmp_path / "out"))
    assert f"# {kind.title} for tiny" in card and kind.describe(config, "bfloat16") in card
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


class Counted:
    """What a process does with a draft while this is in place.

    Attributes:
        opened: files in the order in which they were opened.
        num_classified: times that a draft was given to the first of all kinds to be recognised.
    """

    def __init__(self, monkeypatch) -> None:
        self.opened: list[Path] = []
        self.num_classified = 0
        first = type(registry.KINDS[0])
        recognises = first.recognises

        def note(call):
            def opening(file, *args, **options):
                if not isinstance(file, int):
                    self.opened.append(Path(os.fsdecode(file)))
                return call(file, *args, **options)

            return opening

        def recognising(kind, files):
            self.num_classified += 1
            return recognises(kind, files)

        monkeypatch.setattr(io, "open", note(io.open))
        monkeypatch.setattr(builtins, "open", note(builtins.open))
        monkeypatch.setattr(first, "recognises", recognising)


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.name)
def test_a_draft_is_opened_and_classified_once_on_the_way_from_its_name(kind, target, tmp_path, monkeypatch):
    folder, model = target
    draft = tmp_path / "draft"
    save_draft(fresh(kind, target), draft, metadata={})
    json_files = (draft / "config.json", draft / "eagle_kit.json")

    # To a drafter, checked against its target on the way.
    counted = Counted(monkeypatch)
    load_draft_model(draft, model, target_name=folder, algorithm=kind.algorithm)
    assert [counted.opened.count(file) for file in json_files] == [1, 1]
    assert counted.num_classified == 1

    # To an export with a card.
    export_draft(draft, tmp_path / "out", target=folder)
    assert [counted.opened.count(file) for file in json_files] == [2, 2]
    assert counted.num_classified == 2


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.name)
def test_planned_sizes_are_the_counted_ones(kind, target):
    head = fresh(kind, target)
    sizes = head_sizes(head.config)
    assert sizes.total == sum(parameter.numel() for parameter in head.parameters())
    assert sizes.num_layers == max(1, len(head.blocks)) == head.config.num_modules
    assert sizes.output == head.output.weight.numel()
    assert all(size > 0 for size in kind.saved_activation_bytes(head.config, 2, is_gpu=False))


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.name)
def test_greedy_responses_are_those_of_plain_decoding(kind, target, tmp_path):
    save_draft(fresh(kind, target), tmp_path / "draft", metadata={})
    prompts = [[5, 17, 3, 88], [9, 2]]
    plain = LLM(target[1], max_context=64, max_batch_size=2).generate(prompts, GREEDY)
    llm = LLM(target[1], tmp_path / "draft", max_context=64, max_batch_size=2, algorithm=kind.algorithm)
    drafted = llm.generate(prompts, GREEDY, shape="2,1,3")
    assert [response.token_ids for response in drafted] == [response.token_ids for response in plain]
    assert all(response.stats.num_verifies > 0 for response in drafted)


def test_an_added_kind_is_trained_and_served(tmp_path, monkeypatch):
    """A step of the ordinary trainer, and the ordinary engine behind its checkpoint."""
    monkeypatch.setattr("eagle_kit.train.__main__.TrainConfig", ToyTrainConfig)
    words = [str(make_config(tmp_path)), "head={kind: toy}", "training.max_steps=1"]
    assert train([*words, "--dry-run"]) == 0
    assert train(words) == 0
    draft = tmp_path / "run" / "step-1"
    assert isinstance(load_draft(draft), ToyHead)
    levels = {finding.level for finding in validate_draft(draft, tmp_path / "target")}
    assert levels == {"ok"}
    plain = LLM(tmp_path / "target", max_context=64)
    (expected,) = plain.generate(["a cat"], GREEDY)
    llm = LLM(plain.target, draft, tokenizer=plain.tokenizer, max_context=64)
    for shape in ("2,1,3", "3,2,6"):
        (response,) = llm.generate(["a cat"], GREEDY, shape=shape)
        assert response.token_ids == expected.token_ids and response.stats.num_verifies > 0


def config_of(kind="eagle3", training=(), **head):
    data = {"source": "chats.jsonl"}
    return TrainConfig(
        target="t", output_dir="o", data=data, head={"kind": kind, **head}, training=dict(training)
    )


def test_every_kind_that_a_config_can_name_is_trained():
    trained = [name for kind in registry.head_kinds() for name in kind.trained_as]
    assert sorted(trained) == sorted([*drafts.HEADS, "toy"])
    for name in drafts.HEADS:
        assert name in registry.training_kind(config_of(name)).trained_as
    toy = ToyTrainConfig(target="t", output_dir="o", data={"source": "chats.jsonl"})
    assert registry.training_kind(toy) is TOY


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="head.kind is 'tory'.*eagle3-mla"):
        config_of("tory")


def test_rows_of_later_steps_are_left_out_where_a_kind_or_a_config_says_so():
    def sampling(kind, **training):
        return config_of(kind, training).training.row_sampling

    for kind in ("eagle3", "eagle3-mla", "eagle1", "p-eagle"):
        assert sampling(kind, down_sample_ratio=0.5).shares(4) == (1.0, 0.5, 0.25, 0.2)
        assert sampling(kind, down_sample_ratio=1.0) is None
    assert sampling("eagle3") is sampling("eagle1") is sampling("mtp") is None
    assert sampling("p-eagle").shares(3) == pytest.approx((1.0, 0.8, 0.64))
    assert sampling("p-eagle", down_sample_ratio_min=0.7).shares(3) == pytest.approx((1.0, 0.8, 0.7))
    assert sampling("dflash", num_anchors=9).most == 9


@pytest.mark.parametrize(
    ("kind", "training", "message"),
    [
        ("mtp", {"down_sample_ratio": 0.5}, "down_sample_ratio has no meaning for a head of the kind mtp"),
        (
            "eagle3",
            {"down_sample_ratio_min": 0.5},
            "down_sample_ratio_min is set, but no step leaves rows out",
        ),
        (
            "eagle3",
            {"down_sample_ratio": 0.5, "dpace_alpha": 0.5},
            "down_sample_ratio is 0.5, but dpace_alpha needs all steps",
        ),
        (
            "p-eagle",
            {"loss_normalisation": "sequence"},
            "is 0.8, but loss_normalisation=sequence weighs steps",
        ),
        ("p-eagle", {"loss_normalisation": "published"}, "is 0.8, but loss_normalisation=published weighs"),
    ],
)
def test_rows_are_left_out_only_where_nothing_needs_them(kind, training, message):
    assert config_of("eagle3", {"loss_normalisation": "sequence"}).training.row_sampling is None
    with pytest.raises(ValueError, match=message):
        config_of(kind, training)


def test_whole_models_and_unknown_heads_are_no_heads(target, tmp_path):
    with pytest.raises(UserError, match="is a whole model, not a draft head"):
        _ = DraftFolder.open(target[0]).head_kind
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma4DSparkModel"]}')
    with pytest.raises(UserError, match="is a DSpark draft"):
        _ = DraftFolder.open(tmp_path).kind


def test_other_engines_have_no_class_for_it(target, tmp_path):
    save_draft(fresh(TOY, target), tmp_path / "draft", metadata={})
    with pytest.raises(UserError, match="has no class for heads of this kind"):
        export_draft(tmp_path / "draft", tmp_path / "out", target=target[0], format="vllm")
    with pytest.raises(UserError, match="cannot be written for SGLang: why"):
        refuse("sglang", "why")
    export_draft(tmp_path / "draft", tmp_path / "ours", target=target[0])
    assert "tags: [toy, speculative-decoding]" in (tmp_path / "ours" / "README.md").read_text()
