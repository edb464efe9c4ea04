"""Ask a model: the messages are rendered by its chat template."""

from eagle_kit import LLM, SamplingParams

TARGET = "smollm2-135m-instruct"


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    messages = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    (first,) = llm.chat(messages, SamplingParams(max_tokens=32))
    print(first.text)

    # The conversation goes on; a list of conversations is answered in one batch.
    answer = {"role": "assistant", "content": first.text}
    more = [*messages, answer, {"role": "user", "content": "And at dusk?"}]
    for output in llm.chat([messages, more], max_tokens=32):
        print(output.num_cached_tokens, "tokens were cached;", output.text)


if __name__ == "__main__":
    main()
