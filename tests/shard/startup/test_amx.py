"""`--cpu-amx`: when AMX is asked for, and whole engines on emulated tiles."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import Request, Router
from tests.support.shard.emulated_tiles import compile_emulated
from tests.support.shard.stepping import configure
from tgis.shard.kernels.cpu.amx import instructions, permission
from tgis.shard.kernels.cpu.bf16 import tile_product
from tgis.shard.kernels.cpu.gemm import panels
from tgis.shard.kernels.cpu.ops import BfloatKernels
from tgis.shard.startup.cpu_platform import ON_CPU
from tgis.shard.startup.load import load, prepare
