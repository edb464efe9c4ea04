"""Routes between text and tokens."""

from typing import TYPE_CHECKING

from eagle_kit.core.errors import UserError
from eagle_kit.server.api.body import body_of
from eagle_kit.server.api.documented import body_schema, error_responses
from eagle_kit.server.api.prompts import chat_prompt, chat_tools, text_prompt
from eagle_kit.server.api.protocol import DetokenizeRequest, TokenizeRequest
from eagle_kit.server.api.responses import Text, Tokens
from eagle_kit.server.api.service import Service

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_token_routes(app: "FastAPI", service: Service) -> None:
    """`/tokenize` and `/detokenize`."""
    from fastapi import Depends, Request

    llm = service.llm
    most = service.max_chars
    errors = error_responses(400, 401, 403, 404, 408, 413, 415, 429, 503)

    @app.post("/tokenize", responses=errors, openapi_extra=body_schema(app, TokenizeRequest))
    async def tokenize(
        http: Request,
        body: TokenizeRequest = Depends(body_of(TokenizeRequest, service)),  # noqa: B008
    ) -> Tokens:
        """Token ids of a text, or of messages with the generation prompt."""
        service.check_model(body.model)
        if (chat := body.chat) is not None:
            ids = await service.off_loop(http, chat_prompt, llm, chat, chat_tools(chat), most)
        else:
            special = body.add_special_tokens is not False
            ids = await service.off_loop(http, text_prompt, llm, body.prompt, most, special)
        return Tokens(tokens=ids, count=len(ids), max_model_len=llm.max_context)

    @app.post("/detokenize", responses=errors, openapi_extra=body_schema(app, DetokenizeRequest))
    async def detokenize(
        http: Request,
        body: DetokenizeRequest = Depends(body_of(DetokenizeRequest, service)),  # noqa: B008
    ) -> Text:
        """The text of token ids, special tokens included unless they are to be skipped."""
        service.check_model(body.model)
        size = llm.target.config.vocab_size
        if any(token >= size for token in body.tokens):
            raise UserError(f"tokens has an id outside 0..{size - 1}.", "Use the model's tokens.")
        skip = bool(body.skip_special_tokens)
        return Text(
            prompt=await service.off_loop(
                http, lambda: llm.tokenizer.backend_tokenizer.decode(body.tokens, skip_special_tokens=skip)
            )
        )
