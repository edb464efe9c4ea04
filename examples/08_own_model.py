"""Use a model that is in memory already, such as one that you have just trained with transformers."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eagle_kit import LLM
from eagle_kit.models.loading.source import resolve_target

TARGET = "smollm2-135m-instruct"


def load(folder: Path) -> PreTrainedModel:
    """Load a model; yours may come from anywhere."""
    return AutoModelForCausalLM.from_pretrained(folder)


def main(target: str = TARGET) -> None:
    folder = resolve_target(target)
    model = load(folder)
    llm = LLM(model, tokenizer=AutoTokenizer.from_pretrained(folder))
    (output,) = llm.generate("The capital of France is", max_tokens=8)
    print(repr(output.text))

    # The weights are shared, and the model can still be used by itself.
    ids = llm.tokenizer("The capital of France is", return_tensors="pt").input_ids
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert output.token_ids == theirs[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    main()
