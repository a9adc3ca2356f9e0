"""Refuses a model that does not exist, before `make run` installs the service. It needs only Python."""

import os
import sys

from tgis.errors import OperatorError
from tgis.hub.cache import cache_root, find_model
from tgis.hub.gguf_files import find_gguf


def main() -> None:
    [name] = sys.argv[1:]
    variable = os.environ.get
    if variable("COMPAT"):
        return  # the launcher downloads a missing model
    try:
        cache = cache_root(
            variable("HF_HUB_CACHE"),
            variable("TRANSFORMERS_CACHE"),
            variable("HUGGINGFACE_HUB_CACHE"),
            variable("HF_HOME"),
            variable("HOME"),
        )
        if find_gguf(name, variable("REVISION"), cache) is None:
            find_model(name, variable("REVISION"), cache)
    except OperatorError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
