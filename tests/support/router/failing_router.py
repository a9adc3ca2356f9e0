"""Router with a method that fails unexpectedly. Run it like `python -m tgis`."""

from tgis.cli.main import main
from tgis.router.api.fmaas.servicer import GenerationServicer


async def fail(*_: object) -> None:
    raise ValueError("no such kind")


if __name__ == "__main__":
    GenerationServicer.ModelInfo = fail  # type: ignore[method-assign, assignment]
    main()
