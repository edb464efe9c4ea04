"""Talk to a running server with the `openai` package: `python serve/client_example.py [URL]`.

Start the server first: `eagle-kit serve checkpoints/smollm2-135m-eagle3`.
"""

import os
import sys

from openai import BadRequestError, OpenAI


def main() -> None:
    """A streamed response, a whole one with its speculation, and an error."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("EAGLE_KIT_API_KEY", "none"))
    model = client.models.list().data[0].id
    print(f"# {model}, streamed")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers and where they flow."}],
        max_completion_tokens=96,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            delta = chunk.choices[0].delta
            thought = (delta.model_extra or {}).get("reasoning_content")  # of targets that think
            print(thought or delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n# {chunk.usage.completion_tokens} tokens")

    print("\n# whole, with what speculation did")
    response = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write a haiku about a river."}],
        max_completion_tokens=64,
        seed=1,
        extra_body={"return_speculation": True},
    )
    print(response.choices[0].message.content)
    print(f"# {(response.model_extra or {}).get('speculation')}")

    print("\n# a parameter that is not supported")
    try:
        client.completions.create(model=model, prompt="1, 2, 3,", best_of=3)
    except BadRequestError as error:
        print(error)


if __name__ == "__main__":
    main()
