"""Draft out of earlier text, without a head: for responses that repeat their prompt."""

from eagle_kit import LLM

TARGET = "smollm2-135m-instruct"
TEXT = "def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return a + b + c\n\n\n"


def main(target: str = TARGET) -> None:
    llm = LLM(target, draft="NGRAM")
    (output,) = llm.generate(TEXT + "def add(a, b):", max_tokens=32)
    print(output.text)
    print(f"{output.stats.num_verifies} verifies, accept length {output.stats.accept_length:.2f}")

    llm.set_draft(None)  # plain decoding, of the same loaded target
    (plain,) = llm.generate(TEXT + "def add(a, b):", max_tokens=32)
    assert plain.token_ids == output.token_ids


if __name__ == "__main__":
    main()
