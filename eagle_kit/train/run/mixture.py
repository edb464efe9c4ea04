"""Account of a mixture: what a training run draws from each of its sources, known before it starts."""

from eagle_kit.config.train import TrainConfig
from eagle_kit.data.chat.dataset import PreparedData
from eagle_kit.report.tables import Table
from eagle_kit.train.optim.schedule import Schedule
from eagle_kit.train.run.order import DataOrder, parts_of

HEAD = (
    "source",
    "conversations",
    "rows",
    "tokens",
    "weight",
    "phase",
    "rows drawn",
    "tokens drawn",
    "share",
    "repetitions",
)


def describe_mixture(config: TrainConfig, data: PreparedData) -> str:
    """Table of the sources: what they hold, and what the schedule draws of them.

    Tokens drawn are rows drawn times the mean length of the source's rows.

    Raises:
        UserError: ``max_repeats`` leaves too few rows for the schedule.
    """
    # Rows that the schedule draws of each part.
    num_steps = Schedule.from_config(config.training, len(data)).total_steps
    rows_per_step = config.training.sequences_per_step
    parts = parts_of(config.data, data)
    rows_drawn = DataOrder(parts, rows_per_step, config.seed, num_steps).num_drawn()

    # What each part holds: a source of the data, or all of it if the sources are not drawn apart.
    names = ["all"]
    conversations = [data.num_conversations]
    tokens = [data.num_tokens]
    if len(parts) == len(data.parts):
        names = [held.name for held in data.parts]
        conversations = [held.num_documents for held in data.parts]
        tokens = [held.num_tokens for held in data.parts]
    weights = [""] * len(parts)
    if len(parts) == len(config.data.mix):
        weights = [f"{source.weight:g}" for source in config.data.mix]

    # A line for each part.
    tokens_drawn = []
    for part, num_tokens, num_drawn in zip(parts, tokens, rows_drawn, strict=True):
        tokens_drawn.append(num_tokens * num_drawn / part.num_rows)
    total = sum(tokens_drawn)
    lines = []
    for i, part in enumerate(parts):
        begin, end = part.phase
        line = [
            names[i],
            f"{conversations[i]:,}",
            f"{part.num_rows:,}",
            f"{tokens[i]:,}",
            weights[i],
            f"{begin:.0%} to {end:.0%}",
            f"{rows_drawn[i]:,}",
            f"{tokens_drawn[i]:,.0f}",
            f"{tokens_drawn[i] / total:.1%}",
            f"{rows_drawn[i] / part.num_rows:.2f}",
        ]
        lines.append(line)
    head = (
        f"{num_steps:,} steps of {rows_per_step} rows draw {rows_per_step * num_steps:,} rows, about "
        f"{total:,.0f} tokens:"
    )
    return f"{head}\n\n{Table(HEAD, lines, ('source',)).text()}"
