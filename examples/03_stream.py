"""Print responses while they are written, of one prompt and of several."""

from eagle_kit import LLM

TARGET = "smollm2-135m-instruct"


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    for delta in llm.stream_chat("Count from one to five.", max_tokens=32):
        print(delta.text, end="", flush=True)
    print()

    # Several prompts: every addition says whose it is.
    texts = ["", ""]
    for delta in llm.stream(["The sea is", "A tree has"], max_tokens=16):
        texts[delta.prompt_index] += delta.text
        if delta.finish_reason is not None:
            print(delta.prompt_index, delta.finish_reason, repr(texts[delta.prompt_index]))


if __name__ == "__main__":
    main()
