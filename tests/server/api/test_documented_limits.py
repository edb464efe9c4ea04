"""The how-to pages of serving state the limits that the code has, and OpenAPI describes every parameter."""

from pathlib import Path

import pytest

from eagle_kit.config.engine import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_CONTEXT,
    SERVER_BATCH_SIZE,
    SERVER_UTILIZATION,
    EngineConfig,
)
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_SALT_CHARS
from eagle_kit.core.shape import auto_shape
from eagle_kit.data.chat.arguments import MOST_NUMBER, MOST_PRODUCT
from eagle_kit.engine import scheduler
from eagle_kit.engine.engine import WEIGHTS_COST
from eagle_kit.engine.grammar import bad_words, compiler, schema_rules
from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.memory.engine_memory import TOKENS_OF_REQUEST
from eagle_kit.server.api import body, connection, errors, params, service
from eagle_kit.server.api.documented import MEANINGS
from eagle_kit.server.api.metrics import PREFIX, Metrics
from eagle_kit.server.api.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from eagle_kit.server.api.startup import LOW_ACCEPT_LENGTH
from eagle_kit.server.async_engine import NOTIFY_S, STUCK_S

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to"
ENGINE = EngineConfig()
SERVER = ServerConfig(model_name="m")
SIZES = schema_rules.KEYWORD_SIZES

STATED = {
    "choose-how-a-server-drafts": [
        f"made to fit: {auto_shape('llama')} (tree) or {auto_shape('deepseek_v3')} (chain).",
    ],
    "monitor-a-server": [
        f"Under {LOW_ACCEPT_LENGTH['chain']} tokens per verify of a chain",
        f"({LOW_ACCEPT_LENGTH['tree']} of a tree)",
        f"nobody got a token in {service.PROBE_S:g} seconds",
    ],
    "secure-a-server": [
        f"do not arrive within {connection.HEADERS_S:g} seconds",
        f"a body within {body.READ_S:g} seconds",
        f"one over {SERVER.max_body_bytes >> 20} MiB",
        f"{body.NUM_BODIES * SERVER.max_body_bytes >> 20} MiB, and",
        f"more than {body.MAX_PARTS[b'[']:,} times `[`, `{{` or `:`, or {body.MAX_PARTS[b',']:,} commas",
        f"`--max-queued-requests` ({SERVER.max_queued}); more: 503",
        f"above 2^{params.MAX_REQUEST_LOGPROBS.bit_length() - 1}: 400",
        f"numbers above 2^{MOST_NUMBER.bit_length() - 1},",
        f"above 2^{MOST_PRODUCT.bit_length() - 1} = m n",
        f"takes no byte of its response for {connection.UNREAD_S:g} seconds",
        f"At most {connection.MOST_CONNECTIONS:,} connections are open",
        f"at most {errors.MAX_MESSAGE:,} characters",
    ],
    "send-requests": [
        f"temperature 1, {params.DEFAULT_COMPLETION_TOKENS} tokens for completions",
        f"at most 2^{params.MAX_REQUEST_LOGPROBS.bit_length() - 1} log-probabilities",
    ],
    "serve-a-model": [
        f"responses decoded together ({DEFAULT_BATCH_SIZE}; on a GPU up to {SERVER_BATCH_SIZE})",
        f"share of a GPU that the server takes ({SERVER_UTILIZATION:g})",
        f"tokens of prompt and response ({DEFAULT_MAX_CONTEXT};",
        f"less than {TOKENS_OF_REQUEST:,} tokens for each request",
        f"responses that may wait ({SERVER.max_queued})",
        f"`--grace-period` seconds ({SERVER.grace_period_s:g})",
        f"at most {cpu_graph.MAX_RECORDINGS} a process",
    ],
    "serve-on-many-machines": [
        f"after `--rank-timeout` ({ENGINE.rank_timeout_s:g}) seconds",
        f"the limit is `--load-timeout` ({ENGINE.load_timeout_s:,.0f}) seconds",
        f"after {STUCK_S:g} seconds, and ends {NOTIFY_S:g} later",
    ],
    "share-a-server": [
        f"a text of 1 to {MAX_SALT_CHARS} characters",
        f"The server keeps {compiler.NUM_COMPILED}.",
        f"pages of `--page-size` tokens ({ENGINE.page_size})",
        f"`--max-running-requests` ({DEFAULT_BATCH_SIZE}; on a GPU up to {SERVER_BATCH_SIZE}) responses",
        f"{WEIGHTS_COST['cuda'] // scheduler.MOST_RECOMPUTED} tokens on a GPU",
        f"at most {scheduler.MOST_QUANTUM_TOKENS}.",
        f"`--max-queued-requests` ({SERVER.max_queued}) more",
        f"a turn of {scheduler.QUANTUM_TOKENS} tokens",
        f"more than {scheduler.SHORT_QUANTUM_TOKENS} of that turn",
        f"if nobody does in {service.PROBE_S:g} seconds",
    ],
    "structured-output": [
        f"A regex has at most {compiler.MAX_REGEX_CHARS:,} characters",
        f"a schema {schema_rules.MAX_SCHEMA_CHARS:,}, and a size of at most {schema_rules.MAX_SCHEMA_SIZE:,}",
        f"{schema_rules.SUBSCHEMA_SIZE} for each subschema, `pattern` and bound of a number",
        f"{SIZES['format']} for a `format`",
        f"At most {schema_rules.MAX_DEPTH} subschemas lie in one another",
        f"take {compiler.MAX_FILL_S:g} s of CPU time",
        f"{compiler.MAX_EXTRA_S:g} s in all beyond {compiler.FREE_S * 1000:g} ms a step",
        f"The server keeps {compiler.NUM_COMPILED} compiled grammars",
        f"up to {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} characters",
        f"at most {bad_words.MAX_TOKENS:,} tokens",
    ],
}
"""Sentences with the limits of the code, by the page that has them."""


@pytest.mark.parametrize(
    ("page", "words"), [(page, words) for page, stated in STATED.items() for words in stated]
)
def test_a_page_states_the_limit_of_the_code(page: str, words: str) -> None:
    text = (HOW_TO / f"{page}.md").read_text(encoding="utf-8")
    assert words in " ".join(text.split())


def test_equal_sizes_of_keywords_share_one_number() -> None:
    """The page has one number for a pattern, a bound of a number and a subschema."""
    others = {size for name, size in SIZES.items() if name != "format"}
    assert others == {schema_rules.SUBSCHEMA_SIZE}


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, AbortRequest]
)
def test_every_parameter_of_a_request_has_a_description(model: type) -> None:
    properties = model.model_json_schema()["properties"]
    assert [name for name, schema in properties.items() if not schema.get("description")] == []


def test_every_status_of_an_error_has_a_meaning() -> None:
    statuses = set(errors.TYPES) - {405}  # which no route of the description answers
    assert statuses <= MEANINGS.keys()


def test_every_metric_of_the_engine_has_a_text(scripted) -> None:
    _, engine = scripted("abc")
    lines = Metrics(engine, "tiny").text().decode().splitlines()
    texts = [line.split(maxsplit=3) for line in lines if line.startswith(f"# HELP {PREFIX}")]
    assert len(texts) > 20 and all(len(parts) == 4 for parts in texts)
