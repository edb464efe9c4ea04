"""docs/serving.md states the limits that the code has."""

import re
from pathlib import Path

import pytest

from eagle_kit.cli.serve import SHAPE_DEFAULTS
from eagle_kit.config.engine import EngineConfig, NgramConfig
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
)
from eagle_kit.data.chat.arguments import MOST_NUMBER, MOST_PRODUCT
from eagle_kit.distributed.collectives import START_TIMEOUT
from eagle_kit.engine import scheduler
from eagle_kit.engine.grammar import bad_words, compiler, schema_rules
from eagle_kit.server.api import body, connection, errors, params, service
from eagle_kit.server.api.metrics import PREFIX, Metrics
from eagle_kit.server.api.protocol import ChatRequest, CompletionRequest
from eagle_kit.server.async_engine import NOTIFY_S, STUCK_S

PAGE = " ".join((Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8").split())
ENGINE = EngineConfig()
SERVER = ServerConfig(model_name="m")
NGRAM = NgramConfig()
SIZES = schema_rules.KEYWORD_SIZES

STATED = [
    # Speculation.
    f"window sizes {NGRAM.min_match_window_size} to {NGRAM.max_match_window_size}",
    f"breadth {NGRAM.min_bfs_breadth} to {NGRAM.max_bfs_breadth}",
    f"`capacity` in tokens ({NGRAM.capacity // 10**6} million by default",
    f"those left out are {SHAPE_DEFAULTS.steps}, {SHAPE_DEFAULTS.topk}, {SHAPE_DEFAULTS.tokens}.",
    # Parameters of requests.
    f"`logprobs` and `top_logprobs` (0 to {MAX_LOGPROBS})",
    f"`cache_salt` (a text of 1 to {MAX_SALT_CHARS} characters",
    f"temperature 1, {params.DEFAULT_COMPLETION_TOKENS} tokens for completions",
    f"numbers above 2^{MOST_NUMBER.bit_length() - 1} ",
    f"above 2^{MOST_PRODUCT.bit_length() - 1} = m n",
    f"above 2^{params.MAX_REQUEST_LOGPROBS.bit_length() - 1};",
    # Structured output and forbidden words.
    f"A regex has at most {compiler.MAX_REGEX_CHARS:,} characters",
    f"a schema {schema_rules.MAX_SCHEMA_CHARS:,}, and a size of at most {schema_rules.MAX_SCHEMA_SIZE:,}",
    f"{schema_rules.SUBSCHEMA_SIZE} for each subschema, `pattern` and bound of a number",
    f"{SIZES['format']} for a `format`",
    f"At most {schema_rules.MAX_DEPTH} subschemas lie in one another",
    f"take {compiler.MAX_FILL_S:g} s of CPU time",
    f"{compiler.MAX_EXTRA_S:g} s in all beyond {compiler.FREE_S * 1000:g} ms a step",
    f"The server keeps {compiler.NUM_COMPILED}.",
    f"up to {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} characters",
    f"at most {bad_words.MAX_TOKENS:,} tokens. A word",
    # Errors and limits.
    f"more than {body.MAX_PARTS[b'[']:,} times `[`, `{{` or `:`, or {body.MAX_PARTS[b',']:,} commas",
    f"do not arrive within {connection.HEADERS_S:g} seconds, a body within {body.READ_S:g};",
    f"one over {SERVER.max_body_bytes >> 20} MiB",
    f"and its message has at most {errors.MAX_MESSAGE:,}",
    f"takes no byte of its response for {connection.UNREAD_S:g} seconds",
    f"At most {connection.MOST_CONNECTIONS:,} connections are open",
    f"`busy` if nobody does in {service.PROBE_S:g} seconds",
    f"`--grace-period` seconds ({SERVER.grace_period_s:g})",
    # Fair turns.
    f"`--max-running-requests` ({ENGINE.max_batch_size}) replies",
    f"`--max-queued-requests` ({SERVER.max_queued}) more",
    f"a turn of {scheduler.QUANTUM_TOKENS} tokens",
    f"more than {scheduler.SHORT_QUANTUM_TOKENS} of that turn",
    # Ranks.
    f"after `--rank-timeout` ({ENGINE.rank_timeout_s:g}) seconds",
    f"the limit is {START_TIMEOUT.total_seconds():,.0f} seconds",
    f"after {STUCK_S:g} seconds, and ends {NOTIFY_S:g} later",
]


@pytest.mark.parametrize("words", STATED)
def test_the_page_states_the_limit_of_the_code(words: str) -> None:
    assert words in PAGE


def test_equal_sizes_of_keywords_share_one_number() -> None:
    """The page has one number for a pattern, a bound of a number and a subschema."""
    others = {size for name, size in SIZES.items() if name != "format"}
    assert others == {schema_rules.SUBSCHEMA_SIZE}


CHAT_FIELDS = ChatRequest.model_fields.keys()
COMPLETION_FIELDS = CompletionRequest.model_fields.keys()


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS | COMPLETION_FIELDS))
def test_the_page_names_every_parameter_of_a_request(name: str) -> None:
    section = PAGE.partition("**Parameters of both completions**")[2].partition("**Refused with 400**")[0]
    assert re.search(rf"`{name}[`:]", section) or f"`{name}." in section


def test_the_page_says_which_ignored_parameters_one_of_the_two_requests_has() -> None:
    accepted = PAGE.partition("**Accepted, and without effect**")[2].partition("**Refused")[0]
    before, _, behind = accepted.partition("in chats ")
    assert "in completions `best_of: 1`" in behind
    common = set(re.findall(r"`(\w+)[`:]", before))
    assert "user" in common and common <= CHAT_FIELDS & COMPLETION_FIELDS


def test_every_status_of_an_error_has_a_row() -> None:
    table = PAGE.partition("| status | when |")[2].partition("An error quotes")[0]
    assert [status for status in errors.TYPES if str(status) not in table] == []


def test_every_metric_of_the_engine_has_a_row(scripted) -> None:
    _, engine = scripted("abc")
    lines = Metrics(engine, "tiny").text().decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith(f"# TYPE {PREFIX}")]
    table = PAGE.partition("## Metrics")[2].partition("`process_resident_memory_bytes`")[0]
    missing = [name for name in names if f"`{name.removeprefix(PREFIX)}" not in table]
    assert len(names) > 20 and [name for name in missing if not name.endswith("_created")] == []
