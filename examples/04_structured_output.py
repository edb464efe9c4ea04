"""Responses that match a JSON schema, a regular expression, a list of choices or a grammar."""

import json

from eagle_kit import LLM, SamplingParams, StructuredOutputs

TARGET = "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "year": {"type": "integer"}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "yes" | "no" ", " /[a-z ]{1,20}/ "."'


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    params = SamplingParams(max_tokens=64, structured_outputs=StructuredOutputs(json=SCHEMA))
    (output,) = llm.chat("Name a city and the year in which it was founded, as JSON.", params)
    if output.finish_reason == "stop":  # else it was cut by max_tokens
        print(json.loads(output.text))

    for constraint in ({"choice": ["red", "green", "blue"]}, {"regex": "[0-9]{2}"}, {"grammar": GRAMMAR}):
        (output,) = llm.chat("What is your favourite?", max_tokens=24, structured_outputs=constraint)
        print(output.text)


if __name__ == "__main__":
    main()
