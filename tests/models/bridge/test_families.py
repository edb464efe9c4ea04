"""Bridged targets against transformers' own forward: capture, logits, and the decode cycle."""

import json

import pytest
import torch
from families import FAMILIES, family_config, family_model
from tiny import tiny_head

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.base.draft_model import HeadDraftModel
from eagle_kit.engine.llm import LLM
from eagle_kit.models.bridge.load_check import own_forward
from eagle_kit.models.loading.loader import load_target

QUICK = ("gemma2", "gpt_oss", "llama4_text", "qwen3_next", "falcon_h1")
"""Run in every tier: between them they have every variant of attention."""
SOME = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.nightly) for kind in FAMILIES]


@pytest.fixture(scope="module", params=SOME)
def folder(request, tmp_path_factory):
    if family_config(request.param) is None:
        pytest.skip(f"this transformers does not know {request.param}")
    place = tmp_path_factory.mktemp(request.param)
    model = family_model(request.param)
    model.save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    config["architectures"] = ["Bridged" + config["architectures"][0]]  # no target of our own
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.fixture(scope="module")
def is_quick(folder):
    return any(folder.name.startswith(kind) for kind in QUICK)


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


def texts(vocab_size, *lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]


def test_states_and_logits_of_packed_texts_are_those_of_transformers(target):
    first, second = texts(target.config.vocab_size, 23, 9)
    layers = (0, 2, 3, target.config.num_layers)
    ids = torch.cat((first, second))
    positions = torch.cat((torch.arange(23), torch.arange(9)))
    out = target(ids, positions, target.packed([(0, 23), (23, 32)]), layers)
    states = out.aux_hidden_states.split(target.config.hidden_size, -1)
    before = 0
    for text in (first, second):
        mine = slice(before, before + len(text))
        exact = own_forward(target.model, text).logits
        torch.testing.assert_close(target.logits(out.hidden[mine]), exact, rtol=1e-4, atol=1e-4)
        with pre_hooks(target) as seen:
            own_forward(target.model, text)
        for layer, state in zip(layers, states, strict=True):
            torch.testing.assert_close(state[mine], seen[layer], rtol=1e-4, atol=1e-4)
        before += len(text)


def rows(states):
    """States of the only text; of several streams (Gemma 3n) those of the first, on which layers compute."""
    return states[0] if states.ndim == 3 else states[0, 0]


class pre_hooks:
    """Inputs of the layers in a forward of the model's own, and the last one's output."""

    def __init__(self, target):
        self.layers = list(target.layers)

    def __enter__(self):
        seen = {}

        def keep(number):
            def hook(module, args, kwargs):
                seen[number] = rows(args[0] if args else kwargs["hidden_states"])

            return hook

        def last(module, args, out):
            seen[len(self.layers)] = rows(out[0] if isinstance(out, tuple) else out)

        self.hooks = [
            layer.register_forward_pre_hook(keep(i), with_kwargs=True) for i, layer in enumerate(self.layers)
        ]
        self.hooks.append(self.layers[-1].register_forward_hook(last))
        return seen

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


@pytest.fixture(scope="module")
def wanted(target):
    """Prompts and their greedy continuations by transformers' own forward, whole at every step."""
    found = []
    for prompt in texts(target.config.vocab_size, 4, 17, 9):
        ids = prompt
        for _ in range(14):
            ids = torch.cat((ids, own_forward(target.model, ids).logits[-1].argmax()[None]))
        found.append((prompt.tolist(), ids[len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("shape", ["none", pytest.param("3,1,4", marks=pytest.mark.nightly), "3,2,6"])
def test_greedy_text_of_a_batch_is_that_of_transformers(target, wanted, shape, is_quick):
    draft = None if shape == "none" else HeadDraftModel(tiny_head(target, 67), target)
    options = {"max_batch_size": 4, "max_context": 128, "page_size": 4}
    llm = LLM(target, draft, shape=shape, graph_mode="cycle" if is_quick else "off", **options)
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    for _ in range(2):  # the second time the prompts' prefixes are cached
        responses = llm.generate([prompt for prompt, _ in wanted], params)
        assert [response.token_ids for response in responses] == [text for _, text in wanted]
