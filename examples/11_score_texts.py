"""Score given texts: the log-probability of an answer behind a question, as evaluation harnesses do."""

from eagle_kit import LLM, SamplingParams

TARGET = "smollm2-135m-instruct"
QUESTION = "The capital of France is"
ANSWERS = (" Paris", " Berlin", " a banana")


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    first = len(llm.tokenize(QUESTION))
    outputs = llm.generate([QUESTION + answer for answer in ANSWERS], params)
    for answer, output in zip(ANSWERS, outputs, strict=True):
        entries = output.prompt_logprobs[first:]  # of the answer's tokens; the prompt's very first has none
        print(f"{answer!r} {sum(entry.logprob for entry in entries):.2f}")


if __name__ == "__main__":
    main()
