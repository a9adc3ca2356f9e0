"""Quantizes a GGUF file by llama.cpp's own quantizer, in an environment that has it. Arguments: the file, the
type, the output. llama.cpp decides which tensors keep more bits."""

import ctypes
import sys
from pathlib import Path

import llama_cpp


def main() -> None:
    source, kind, output = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    unfinished = Path(f"{output}.part")
    status = llama_cpp.llama_model_quantize(source.encode(), bytes(unfinished), ctypes.byref(params))
    if status:
        raise SystemExit(f"llama_model_quantize gave {status}")
    unfinished.rename(output)


if __name__ == "__main__":
    main()
