"""A server in this process, and OpenAI's client against it."""

import threading
import time

from openai import OpenAI

from eagle_kit import LLM
from eagle_kit.config.server import ServerConfig
from eagle_kit.server.api.app import create_app
from eagle_kit.server.api.server import bind, make_server

TARGET = "smollm2-135m-instruct"


def main(target: str = TARGET) -> None:
    llm = LLM(target)
    server = make_server(create_app(llm, llm.engine(), ServerConfig(model_name="mine")))
    socket = bind("127.0.0.1", 0)  # a free port
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    while not server.started:
        time.sleep(0.01)

    client = OpenAI(base_url=f"http://127.0.0.1:{socket.getsockname()[1]}/v1", api_key="none")
    messages = [{"role": "user", "content": "Say hello."}]
    try:
        response = client.chat.completions.create(model="mine", messages=messages, max_completion_tokens=16)
        print(response.choices[0].message.content)
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
