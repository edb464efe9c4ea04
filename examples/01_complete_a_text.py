"""Continue a text as it stands: no chat template, as vLLM's ``LLM.generate``."""

from eagle_kit import LLM, SamplingParams

TARGET = "smollm2-135m-instruct"


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    params = SamplingParams(max_tokens=16, temperature=0.0)

    # One text, or several in one batch; an output for each.
    outputs = llm.generate(["The capital of France is", "1, 2, 3, 4,"], params)
    for output in outputs:
        print(repr(output.outputs[0].text), output.finish_reason)

    # Parameters as keywords, a text that ends the response, and token ids in place of a text.
    ids = llm.tokenizer("1, 2, 3,", return_tensors="pt").input_ids
    (output,) = llm.generate(ids, max_tokens=16, stop=" 6")
    print(repr(output.text), output.finish_reason)


if __name__ == "__main__":
    main()
