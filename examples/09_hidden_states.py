"""Hidden states of texts, for a probe, an embedding or a look at what a draft head reads."""

from eagle_kit import LLM

TARGET = "smollm2-135m-instruct"


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    num_layers = llm.target.config.num_layers
    texts = ["Paris is a city.", "Two plus two is four."]

    # Of a layer its input, which is hidden_states[layer] of transformers.
    for text, states in zip(texts, llm.hidden_states(texts, layers=[1, num_layers // 2]), strict=True):
        print(text, len(states.token_ids), "tokens")
        for layer, rows in states.layers.items():
            print("  input of layer", layer, tuple(rows.shape), f"norm {rows.norm(dim=-1).mean():.1f}")
        print("  behind the final norm", tuple(states.final.shape))


if __name__ == "__main__":
    main()
