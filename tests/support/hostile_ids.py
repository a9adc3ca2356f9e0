"""Prompt and adapter ids that must not be found, and files that lead out of a store."""

import os
from pathlib import Path

from tests.support.prompt_files import random_prompt, save_lora, save_prompt

HOSTILE = [
    "",
    ".",
    "..",
    "/",
    "//",
    "./a",
    "a/.",
    "a/..",
    "a/../a",
    "../outside",
    "../root/a",
    "nested/../../outside",
    "a/../../outside",
    "...",
    "..data/a",
    "..2026/a",
    ".hidden",
    ".a.swp",
    "a.swp",
    "a.swp/b",
    "b/a.swp",
    "/a",
    "//a",
    "/etc",
    "/etc/passwd",
    "{outside}",
    "{root}/a",
    "file:///etc/passwd",
    "~",
    "~root",
    "$HOME",
    "a\0",
    "a\0/../../outside",
    "a\n",
    "\na",
    "a\r\nb",
    "a b",
    " a",
    "a ",
    "a\\b",
    "..\\outside",
    "%2e%2e/outside",
    "..%2foutside",
    "%00",
    "a%2fb",
    "\u2025/outside",
    "\uff0e\uff0e/outside",
    "\u202ea",
    "\u0430",
    "é",
    "a:b",
    "a*",
    "a?",
    "[a]",
    "a;b",
    "a|b",
    "a'b",
    'a"b',
    "{{a}}",
    "x" * 256,
    "x" * 257,
    "n" * 200 + "/" + "o" * 100,
    "x" * 4096,
    "a/" * 128 + "b",
    "a/" * 2048,
    "link_out",
    "link_out/b",
    "link_to_file_out",
    "link_up",
    "link_up/outside",
    "loop",
    "loop/a",
    "broken",
    "decoder_out",
    "decoder_up",
    "decoder_pipe",
    "decoder_directory",
    "decoder_broken",
    "decoder_loop",
    "decoder_device",
    "peft_out",
    "config_out",
    "empty",
    "a/decoder.pt",
    "a/decoder.pt/x",
]


def write_ways_out(root: Path, outside: Path, seen_as: Path) -> None:
    """Write links of every kind that lead out of the store to `outside`, which is visible at `seen_as`."""
    for directory in (outside, outside / "b", root / ".hidden", root / "a.swp", root / "b" / "a.swp"):
        save_prompt(directory, random_prompt())
    save_prompt(root / ("n" * 200) / ("o" * 100), random_prompt())
    save_lora(outside / "lora")
    (root / "link_out").symlink_to(seen_as)
    (root / "link_to_file_out").symlink_to(seen_as / "decoder.pt")
    (root / "link_up").symlink_to("..")
    (root / "loop").symlink_to("loop")
    (root / "broken").symlink_to("nothing")
    for kind, target in (
        ("out", seen_as / "decoder.pt"),
        ("up", "../../outside/decoder.pt"),
        ("broken", "nothing"),
        ("loop", "decoder.pt"),
        ("device", "/dev/zero"),
    ):
        (root / f"decoder_{kind}").mkdir()
        (root / f"decoder_{kind}" / "decoder.pt").symlink_to(target)
    (root / "decoder_pipe").mkdir()
    os.mkfifo(root / "decoder_pipe" / "decoder.pt")
    (root / "decoder_directory" / "decoder.pt").mkdir(parents=True)
    (root / "empty").mkdir()
    for name, linked in (("peft_out", "adapter_model.safetensors"), ("config_out", "adapter_config.json")):
        save_lora(root / name)
        (root / name / linked).unlink()
        (root / name / linked).symlink_to(seen_as / "lora" / linked)
