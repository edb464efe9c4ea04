"""What can be asked of ``LLM`` in Python, and the sentences for what cannot."""

import json

import numpy as np
import pytest
import torch
from tiny import randomise, tiny_head, tiny_target
from tiny_run import TEMPLATE, make_target, tokens_of
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from eagle_kit import LLM, SamplingParams, StructuredOutputs
from eagle_kit.core.errors import UserError
from eagle_kit.core.structured_outputs import Grammar
from eagle_kit.models.loading.source import load_tokenizer

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("face") / "target")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_batch_size=4, max_context=200)


@pytest.fixture(scope="module")
def drafted(llm):
    head = tiny_head(llm.target, 250)
    return LLM(llm.target, head, tokenizer=llm.tokenizer, max_batch_size=4, max_context=200)


def ids_of(outputs):
    return [output.token_ids for output in outputs]


def test_a_text_is_continued_and_messages_are_rendered(llm):
    (raw,) = llm.generate("Hi", GREEDY)
    (chat,) = llm.chat(MESSAGES, GREEDY)
    assert raw.prompt_ids == raw.prompt_token_ids == tokens_of("Hi")
    assert chat.prompt_ids == tokens_of("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids_of(llm.chat("Hi", GREEDY)) == ids_of(llm.chat([MESSAGES], GREEDY)) == [chat.token_ids]
    assert raw.outputs[0].text == raw.text and raw.outputs == [raw]
    assert raw.prompt == "Hi" and chat.prompt is None and llm.generate([[72]], GREEDY)[0].prompt is None


@pytest.mark.parametrize(
    "given",
    [
        [72, 105],
        (72, 105),
        [[72, 105]],
        torch.tensor([72, 105]),
        torch.tensor([[72, 105]]),
        np.array([72, 105]),
        [np.int64(72), np.int64(105)],
        [torch.tensor([72, 105])],
        {"prompt_token_ids": [72, 105]},
        {"prompt_token_ids": None, "input_ids": [72, 105]},
        [{"prompt_token_ids": None, "input_ids": [72, 105]}],
        [{"prompt_token_ids": [72, 105]}],
        {"input_ids": torch.tensor([[72, 105]])},
    ],
    ids=str,
)
def test_token_ids_come_in_many_forms(llm, given):
    (output,) = llm.generate(given, GREEDY)
    assert output.prompt_ids == [72, 105] and type(output.prompt_ids[0]) is int
    assert ids_of([output]) == ids_of(llm.generate([[72, 105]], GREEDY))


def test_a_text_may_be_a_mapping_and_a_result_of_the_tokenizer_its_ids(llm):
    expected = ids_of(llm.generate(["Hi", "Ho"], GREEDY))
    assert ids_of(llm.generate([{"prompt": "Hi"}, {"prompt": "Ho"}], GREEDY)) == expected
    assert ids_of(llm.generate(llm.tokenizer(["Hi", "Ho"], return_tensors="pt"), GREEDY)) == expected
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("call", "given", "cause"),
    [
        ("generate", MESSAGES, "generate was given a message"),
        ("generate", [MESSAGES], "generate was given messages"),
        ("generate", MESSAGES[0], "generate was given a message"),
        ("generate", None, "None is no prompt"),
        ("generate", [[1.5]], "is no prompt"),
        ("generate", torch.tensor([1.5]), "is no prompt"),
        ("generate", {"text": "Hi"}, "is no prompt"),
        ("generate", {"prompt": None}, "is no prompt"),
        ("generate", {"prompt_token_ids": []}, "empty"),
        ("generate", [{"prompt_token_ids": []}], "empty"),
        ("generate", {"prompt": "Hi", "cache_salt": "s"}, "key 'cache_salt'"),
        ("generate", [{"prompt": "Hi", "multi_modal_data": {"image": 1}}], "key 'multi_modal_data'"),
        ("generate", {"prompt": "Hi", "prompt_token_ids": [72]}, "both prompt and prompt_token_ids"),
        ("generate", {"input_ids": [[72, 0]], "attention_mask": [[1, 0]]}, "have padding"),
        ("generate", {"input_ids": [0, 72], "attention_mask": torch.tensor([0, 1])}, "have padding"),
        ("chat", {"messages": MESSAGES}, "a mapping with messages"),
        ("chat", [MESSAGES, {"messages": MESSAGES}], "a mapping with messages"),
        ("chat", MESSAGES[0], "One message was given instead of a conversation"),
        ("chat", [MESSAGES, MESSAGES[0]], "A message stands where a conversation is expected"),
        ("chat", 5, "5 is no prompt"),
        ("chat", "  ", "The prompt is empty"),
        ("chat", [{"role": "nobody", "content": "Hi"}], "unknown role"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_one_sentence(llm, call, given, cause):
    with pytest.raises(UserError, match=cause):
        getattr(llm, call)(given, GREEDY)


def test_parameters_are_one_object_or_several_or_keywords(llm):
    expected = ids_of(llm.generate("Hi", SamplingParams(max_tokens=5, ignore_eos=True)))
    assert ids_of(llm.generate("Hi", max_tokens=5, ignore_eos=True)) == expected
    assert ids_of(llm.generate("Hi", sampling_params=GREEDY, max_tokens=5)) == expected
    several = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 6)]
    assert [len(ids) for ids in ids_of(llm.generate(["Hi", "Ho"], several))] == [3, 6]
    with pytest.raises(UserError, match="1 prompts have 2 sampling parameters"):
        llm.generate("Hi", several)
    with pytest.raises(UserError, match="no_such_field"):
        llm.generate("Hi", no_such_field=1)


def test_parameters_may_be_mappings(llm):
    expected = ids_of(llm.generate("Hi", SamplingParams(max_tokens=5, ignore_eos=True)))
    fields = {"max_tokens": 5, "ignore_eos": True}
    assert ids_of(llm.generate("Hi", fields)) == ids_of(llm.generate(["Hi"], [fields])) == expected
    assert ids_of(llm.generate("Hi", {"max_tokens": 9, "ignore_eos": True}, max_tokens=5)) == expected
    for wrong, cause in [({"max_new_tokens": 5}, "max_new_tokens"), ("greedy", "'greedy'"), ([5], "are 5")]:
        with pytest.raises(UserError, match=cause):
            llm.generate("Hi", wrong)


def test_a_stop_text_is_a_text_or_a_list(llm):
    (whole,) = llm.generate("Hi", max_tokens=12, ignore_eos=True)
    stop = whole.text[3:5]
    for given in (stop, [stop], (stop,)):
        (output,) = llm.generate("Hi", max_tokens=12, ignore_eos=True, stop=given)
        assert output.finish_reason == "stop" and output.text == whole.text[: whole.text.index(stop)]


def test_n_responses_are_those_of_their_seeds(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
    seen = []
    outputs = llm.generate(["Hi", "Ho"], params, on_finish=lambda at, output: seen.append((at, output)))
    for text, output in zip(["Hi", "Ho"], outputs, strict=True):
        assert [response.index for response in output.outputs] == [0, 1, 2]
        for response in output.outputs:
            alone = SamplingParams(temperature=1.0, seed=4 + response.index, max_tokens=8, ignore_eos=True)
            assert response.token_ids == llm.generate(text, alone)[0].token_ids
    assert sorted(at for at, _ in seen) == [0, 1]
    assert all(len(output.outputs) == 3 for _, output in seen)
    free = llm.generate("Hi", n=2, temperature=1.0, max_tokens=20, ignore_eos=True)[0]
    assert free.outputs[0].token_ids != free.outputs[1].token_ids


@pytest.mark.parametrize("call", ["stream", "stream_chat"])
def test_a_stream_joins_to_the_responses(drafted, call):
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=10, ignore_eos=True, stop="zz")
    whole = (drafted.generate if call == "stream" else drafted.chat)(["Hi", "Ho"], params, shape="3,1,4")
    texts = {}
    tokens = {}
    reasons = {}
    for delta in getattr(drafted, call)(["Hi", "Ho"], params, shape="3,1,4"):
        key = delta.prompt_index, delta.index
        assert key not in reasons, "the finish reason is the last one's"
        texts[key] = texts.get(key, "") + delta.text
        tokens.setdefault(key, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            reasons[key] = delta.finish_reason
    for at, output in enumerate(whole):
        for response in output.outputs:
            key = at, response.index
            assert (texts[key], tokens[key], reasons[key]) == (
                response.text,
                response.token_ids,
                response.finish_reason,
            )


def test_a_stream_that_is_left_ends_its_responses_and_one_that_is_not_keeps_the_model(llm):
    for _ in llm.stream("Hi", max_tokens=50, ignore_eos=True):
        break
    assert not llm.engine().has_work and llm.engine().kv_usage == 0.0
    stream = llm.stream("Hi", max_tokens=50, ignore_eos=True)
    next(stream)
    with pytest.raises(UserError, match="still serves another call"):
        llm.generate("Ho", GREEDY)
    stream.close()
    assert len(llm.generate("Ho", GREEDY)) == 1
    with pytest.raises(UserError, match="no log-probabilities of the prompt"):
        llm.stream("Hi", prompt_logprobs=1)


def test_too_little_memory_for_states_is_one_sentence(llm, monkeypatch):
    def fail(target, ids, more):
        raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB.")

    monkeypatch.setattr("eagle_kit.engine.llm.text_states", fail)
    with pytest.raises(UserError, match="out of memory while computing hidden states"):
        llm.hidden_states("Hi")


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        (StructuredOutputs(json=SCHEMA), lambda text: json.loads(text)["a"] in ("x", "y")),
        (StructuredOutputs(json=json.dumps(SCHEMA)), lambda text: json.loads(text)["a"] in ("x", "y")),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"choice": ["a.c", "d|e"]}, lambda text: text in ("a.c", "d|e")),
        ({"grammar": 'start: "on" | "off"'}, lambda text: text in ("on", "off")),
    ],
    ids=["json", "json text", "regex", "choice", "grammar"],
)
def test_responses_match_their_constraint(drafted, constraint, matches):
    pytest.importorskip("llguidance")
    (output,) = drafted.chat("Say.", max_tokens=60, structured_outputs=constraint)
    assert output.finish_reason == "stop" and matches(output.text)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"structured_outputs": {}}, "is empty"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has regex, choice"),
        ({"structured_outputs": {"pattern": "a"}}, "unknown name 'pattern'"),
        ({"structured_outputs": "a"}, "which is no constraint"),
        ({"structured_outputs": {"json": "{"}}, "is no JSON"),
        ({"structured_outputs": {"json": [1]}}, "JSON schema of structured_outputs is"),
        ({"structured_outputs": {"json": {"a": {1}}}}, "cannot be written as JSON"),
        ({"structured_outputs": {"choice": "ab"}}, "choice of structured_outputs is 'ab'"),
        ({"structured_outputs": {"choice": []}}, "choice of structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "choice of structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "regex of structured_outputs is 5"),
        ({"grammar": "[0-9]+"}, "which is no Grammar"),
        ({"grammar": Grammar("json_object"), "structured_outputs": {"regex": "a"}}, "exclude each other"),
        ({"allowed_token_ids": [1], "structured_outputs": {"regex": "a"}}, "exclude each other"),
        ({"stop": 5}, "stop has 5"),
        ({"stop": ["a", 5]}, "stop has 5"),
        ({"stop": ""}, "stop text is empty"),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5'"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids has 1.5"),
        ({"n": 0}, "n is 0"),
        ({"n": 1.5}, "n is 1.5"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ],
    ids=str,
)
def test_wrong_parameters_are_one_sentence(fields, cause):
    with pytest.raises(UserError, match=cause):
        SamplingParams(**fields)


def test_a_grammar_that_cannot_be_compiled_is_refused(llm):
    pytest.importorskip("llguidance")
    for grammar in ("start: nowhere", "begin: /a/", "x" * 5000):
        with pytest.raises(UserError):
            llm.generate("Hi", structured_outputs={"grammar": grammar})


def test_hidden_states_are_those_of_transformers(folder, llm):
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = ["The cat sees the dog.", "Hi"]
    found = llm.hidden_states(texts, layers=[3, 1, 1])
    for text, states in zip(texts, found, strict=True):
        assert states.token_ids == tokens_of(text)
        with torch.no_grad():
            theirs = model(torch.tensor([states.token_ids]), output_hidden_states=True).hidden_states
        assert list(states.layers) == [1, 3]
        for layer, rows in states.layers.items():
            assert torch.allclose(rows, theirs[layer][0], atol=1e-4)
        assert torch.allclose(states.final, theirs[-1][0], atol=1e-4)
    (alone,) = llm.hidden_states(texts[0])
    assert alone.layers == {} and torch.allclose(alone.final, found[0].final)
    probe = torch.nn.Linear(64, 2)
    probe(alone.final).sum().backward()  # states may be used in a training


@pytest.mark.parametrize(
    ("texts", "layers", "cause"),
    [
        ("Hi", [5], "There is no layer 5"),
        ("Hi", [-1], "There is no layer -1"),
        (["Hi", ""], [], "Prompt 1 of 2: The text is empty"),
        ([[300]], [], "token id outside 0..299"),
        ([[1] * 600], [], "has 600 tokens"),
    ],
    ids=str,
)
def test_states_that_cannot_be_had_are_refused(llm, texts, layers, cause):
    with pytest.raises(UserError, match=cause):
        llm.hidden_states(texts, layers=layers)


def test_acceptance_is_the_sum_over_responses(drafted, llm):
    stats = drafted.acceptance(["Hi", "Ho"], GREEDY)
    outputs = drafted.chat(["Hi", "Ho"], GREEDY, shape=drafted.default_shape)
    assert stats.num_verifies == sum(output.stats.num_verifies for output in outputs) > 0
    assert stats.num_emitted_tokens == sum(len(output.token_ids) - 1 for output in outputs)
    with pytest.raises(UserError, match="no draft"):
        llm.acceptance("Hi")


def test_ngram_is_a_draft_by_its_name(llm):
    own = LLM(llm.target, "ngram", tokenizer=llm.tokenizer, max_context=200)
    assert own.config.algorithm == "NGRAM" and own.default_shape.steps > 0
    expected = ids_of(own.generate("abababab", GREEDY))
    own.set_draft(None)
    assert own.config.algorithm != "NGRAM" and ids_of(own.generate("abababab", GREEDY)) == expected
    own.set_draft("NGRAM")
    assert own.acceptance("abababab", GREEDY, max_tokens=80).num_verifies > 0


def test_a_loaded_model_of_a_family_that_is_written_here_shares_its_weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = [2, 7]
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    own = LLM(model, tokenizer=tokenizer, max_context=200)
    ids = tokens_of("The cat")
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert ids_of(own.generate([ids], GREEDY)) == [theirs[0, len(ids) :].tolist()]
    assert own.target.embed_tokens.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert own.target.config.eos_token_ids == (2, 7)


def test_a_loaded_model_runs_through_the_bridge_and_stays_as_it_is():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=131,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=16,
        eos_token_id=1,
    )
    model = randomise(Gemma3ForCausalLM(config), 0, 0.2).eval()
    ids = [5, 6, 7, 8]
    before = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    own = LLM(model, max_context=64)
    assert own.target.config.model_type == "gemma3_text"
    assert ids_of(own.generate([ids], GREEDY)) == [before[0, len(ids) :].tolist()]
    after = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert after.tolist() == before.tolist() and model.config._attn_implementation != "eagle_kit"
    assert all(weight.requires_grad for weight in model.parameters()), "it can still be trained"
    weight = model.get_input_embeddings().weight
    assert own.target.embed_tokens.weight.data_ptr() == weight.data_ptr()


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(UserError, match="loaded Linear, which is no causal language model"):
        LLM(torch.nn.Linear(2, 2))


def test_a_model_without_a_tokenizer_takes_token_ids():
    llm = LLM(tiny_target(), max_context=64)
    assert len(llm.generate([1, 2], GREEDY)[0].token_ids) == 8
    for call in (llm.generate, llm.chat):
        with pytest.raises(UserError, match="without a tokenizer"):
            call("Hi")


def test_a_tokenizer_may_be_the_name_of_one(llm, folder):
    for name in (folder, str(folder)):
        named = LLM(llm.target, tokenizer=name, max_context=200)
        assert ids_of(named.generate("Hi", GREEDY)) == ids_of(llm.generate("Hi", GREEDY))
    with pytest.raises(UserError, match="tokenizer 'no-such-folder' is neither a folder"):
        LLM(llm.target, tokenizer="no-such-folder")


READS_ALL = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% if enable_thinking %}(think){% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}>"
)
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def test_a_chat_has_tools_and_arguments_of_the_template(llm, tmp_path):
    (tmp_path / "template.jinja").write_text(READS_ALL)
    template = tmp_path / "template.jinja"
    own = LLM(llm.target, tokenizer=llm.tokenizer, chat_template=template, max_context=200)
    given = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
    for conversation in (MESSAGES, [MESSAGES], "Hi"):
        (output,) = own.chat(conversation, GREEDY, **given)
        assert output.prompt_ids == tokens_of("[clock](think)<user>Hi>")
    text = "".join(delta.text for delta in own.stream_chat(MESSAGES, GREEDY, **given))
    assert text == output.text
    assert own.chat(MESSAGES, GREEDY)[0].prompt_ids == tokens_of("<user>Hi>")


@pytest.mark.parametrize(
    ("conversation", "given", "cause"),
    [
        (MESSAGES, {"tools": [TOOL]}, "no place for tools"),
        (MESSAGES, {"tools": [{"name": 5}]}, "a tool without a name"),
        (MESSAGES, {"chat_template_kwargs": {"enable_thinking": False}}, "does not read enable_thinking"),
        ([72, 105], {"tools": [TOOL]}, "no list of messages"),
    ],
)
def test_what_a_template_would_leave_out_of_a_chat_is_refused(llm, conversation, given, cause):
    with pytest.raises(UserError, match=cause):
        llm.chat(conversation, GREEDY, **given)
