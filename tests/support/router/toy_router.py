"""Router with an additional API, `toy`, known only to the registry. Run it like `python -m tgis`."""

import json

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tgis.cli.main import main
from tgis.router.api import registry
from tgis.router.api.http.call_context import read_body
from tgis.router.api.http.chat_api import ChatApi
from tgis.router.api.http.errors import describe_error
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.openapi import ErrorTexts, Operation
from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.api.interface import Interface
from tgis.router.errors import Code
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.parameters import Parameters
from tgis.sampling_parameters import Range

TOY = ApiRules(
    "toy",
    temperature=Range(0, 1.5, refusal="a toy must not get hot"),
    default_max_new_tokens=3,
    paths={"Play": "/toy/play"},
    statuses={**dict.fromkeys(Code, 500), Code.INVALID_ARGUMENT: 418},
)


class ToyErrors:
    def respond(self, error: Exception) -> Response:
        status, text = describe_error(error, TOY)
        return PlainTextResponse(f"toy: {text}", status)

    def last_events(self, error: Exception) -> bytes:
        return b"broken"


def build(parts: ServiceParts, chats: ChatApi) -> HttpApi:
    async def play(request: Request) -> Response:
        fields, call = json.loads(await read_body(request)), request.state.call
        parameters = Parameters(sample=True, temperature=fields.get("heat"))
        [result] = await parts.service.generate(
            GenerationCall(
                "Play", "single", [fields["text"]], parameters, str, call.metadata, call.connection, api=TOY
            )
        )
        assert result.last is not None
        return JSONResponse({"text": result.text, "tokens": result.last.num_generated})

    operation = Operation("/toy/play", "Play", (dict[str, str],), (dict[str, str],))
    return HttpApi(
        TOY,
        [Route("/toy/play", play, methods=["POST"])],
        ToyErrors(),
        prefix="/toy/",
        operations=[(operation, ErrorTexts(str, {"418": "A field is wrong."}))],
    )


if __name__ == "__main__":
    registry.INTERFACES += (Interface(rules=TOY, build_http_api=build, model_placeholders=("doll",)),)
    main()
