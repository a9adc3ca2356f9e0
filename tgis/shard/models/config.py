"""Reads values out of a checkpoint's config.json, so that what is missing or odd is said in one line."""

from collections.abc import Mapping
from typing import Any

from tgis.shard.layers.activation import NAMES
from tgis.shard.layers.rotary import LinearScaling, Llama3Scaling, Rope, YarnScaling
from tgis.shard.models.spec import UnsupportedModelError
