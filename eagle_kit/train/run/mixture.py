"""Account of a mixture: what a training run draws from each of its sources, known before it starts."""

from eagle_kit.config.train import TrainConfig
from eagle_kit.data.chat.dataset import PreparedData
from eagle_kit.report.tables import Table
from eagle_kit.train.optim.schedule import Schedule
from eagle_kit.train.run.order import DataOrder, parts_of

HEAD = (
    *("source", "conversations", "rows", "tokens", "weight", "phase"),
    *("rows drawn", "tokens drawn", "share", "repetitions"),
)


def describe_mixture(config: TrainConfig, data: PreparedData) -> str:
    """Table of sources: what they hold, and what the schedule draws of them. Tokens drawn are rows drawn
    times the mean length of the source's rows.

    Raises:
        UserError: ``max_repeats`` leaves too few rows for the schedule.
    """
    schedule = Schedule.from_config(config.training, len(data))
    size, steps = config.training.sequences_per_step, schedule.total_steps
    parts = parts_of(config.data, data)
    drawn = DataOrder(parts, size, config.seed, steps).num_drawn()
    sources = config.data.mix if len(parts) == len(config.data.mix) else (None,)
    held = data.parts if len(parts) == len(data.parts) else None
    lines, tokens = [], []
    for i, (part, source, rows) in enumerate(zip(parts, sources, drawn, strict=True)):
        of_part = held[i].num_tokens if held else data.num_tokens
        documents = held[i].num_documents if held else data.num_conversations
        tokens.append(of_part * rows / part.num_rows)
        name = held[i].name if held else "all"
        weight = "" if source is None else f"{source.weight:g}"
        phase = "{:.0%} to {:.0%}".format(*part.phase)
        lines.append([name, f"{documents:,}", f"{part.num_rows:,}", f"{of_part:,}", weight, phase])
        lines[-1] += [f"{rows:,}", f"{tokens[-1]:,.0f}", "", f"{rows / part.num_rows:.2f}"]
    for line, mine in zip(lines, tokens, strict=True):
        line[-2] = f"{mine / sum(tokens):.1%}"
    head = f"{steps:,} steps of {size} rows draw {size * steps:,} rows, about {sum(tokens):,.0f} tokens:"
    return f"{head}\n\n{Table(HEAD, lines, ('source',)).text()}"
