"""What a chat template may be given: names that it reads, in sizes that it cannot make large."""

import pytest
from chat_templates import tokenizer_for

from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.arguments import MOST_NUMBER, MOST_PRODUCT, check_arguments, names_read
from eagle_kit.data.chat.messages import ChatPrompt, Unusable
from eagle_kit.data.chat.renderer import ChatRenderer

READS = "{{ prefix * width }}"


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ a }} You are {# b #} helpful {% raw %}{{ c }}{% endraw %}{{ 'd' }}", {"a"}),
        ("{% for x in y %}{{ loop.index ~ x.role }}{% break %}{% endfor %}", {"y"}),
        ("{% generation %}{{ a }}{% endgeneration %}", {"a"}),
        ("{% macro m(c) %}{{ c ~ d }}{% endmacro %}{{ m(e) }}", {"d", "e"}),
        ("{% set a = a | default(true) %}{% set b = 1 %}{{ a ~ b }}", {"a"}),
        ("{% set ns = namespace(f=g) %}{% if a is defined and a %}{{ ns.f }}{% endif %}", {"a", "g"}),
        ("{{ range(3) }}{{ dict(a=b) }}", {"b"}),
    ],
)
def test_names_are_those_that_a_template_reads_and_does_not_set(template, names):
    assert names_read(template) == names


@pytest.mark.parametrize("name", ["role", "loop", "message", "content", "for", "function", "start_header_id"])
def test_words_of_a_template_that_are_no_variables_are_refused(name):
    tokenizer = tokenizer_for("llama3")
    assert name in tokenizer.chat_template
    with pytest.raises(Unusable, match=f"does not read {name}"):
        check_arguments(tokenizer, tokenizer.chat_template, {name: 1})


def test_what_to_do_about_an_argument_is_not_about_the_turns():
    prompt = ChatPrompt([{"role": "user", "content": "Hi"}], chat_template_kwargs={"unheard_of": 1})
    with pytest.raises(UserError, match="does not read unheard_of") as error:
        ChatRenderer(tokenizer_for("llama3")).prompt_text(prompt)
    assert "chat_template_kwargs" in error.value.remedy


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception", "bos_token", "tokenize"])
def test_what_the_server_gives_itself_is_no_argument(name):
    tokenizer = tokenizer_for("llama3")
    with pytest.raises(Unusable, match="no argument of a chat template"):
        check_arguments(tokenizer, tokenizer.chat_template, {name: 1})


def check(**kwargs):
    check_arguments(tokenizer_for("llama3"), READS, kwargs)


def test_the_largest_sizes_are_taken():
    check(width=MOST_NUMBER, prefix=None)
    check(width=-MOST_NUMBER, prefix=True)
    check(prefix="a" * 10**6)
    check(prefix="a" * (MOST_PRODUCT // MOST_NUMBER - len("prefixwidth")), width=MOST_NUMBER)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"width": MOST_NUMBER + 1},
        {"width": -MOST_NUMBER - 1},
        {"width": 1e300},
        {"width": float("inf")},
        {"width": float("nan"), "prefix": 1},
        {"width": [{"a": [10**10]}]},
        {"prefix": "a" * (MOST_PRODUCT // MOST_NUMBER), "width": MOST_NUMBER},
        {"prefix": {"a" * (MOST_PRODUCT // 1000): 1}, "width": 1001},
    ],
)
def test_what_a_template_could_make_too_large_is_refused(kwargs):
    with pytest.raises(Unusable, match="chat_template_kwargs have"):
        check(**kwargs)


def test_a_template_that_cannot_be_parsed_is_named():
    with pytest.raises(Unusable, match="no template"):
        check_arguments(tokenizer_for("llama3"), "{{ a", {"a": 1})
