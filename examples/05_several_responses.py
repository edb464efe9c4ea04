"""Several sampled responses to one prompt, with the log-probabilities of their tokens."""

from eagle_kit import LLM, SamplingParams

TARGET = "smollm2-135m-instruct"


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    params = SamplingParams(n=3, temperature=0.8, top_p=0.95, seed=0, max_tokens=12, logprobs=2)
    (output,) = llm.generate("My favourite animal is", params)
    for response in output.outputs:
        print(response.index, f"{response.cumulative_logprob:.2f}", repr(response.text))

    # Of each token: its log-probability, and the most likely alternatives as (token id, log-probability).
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        names = [llm.tokenizer.decode(alternative) for alternative, _ in entry.top]
        print(f"{llm.tokenizer.decode(token)!r} {entry.logprob:.2f}", names)


if __name__ == "__main__":
    main()
