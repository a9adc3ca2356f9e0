"""Checkpoints of every family with soft prompts, and peft's answers."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, draw_inputs
from tests.support.shard.prompt_oracle import PromptOracle
from tests.support.shard.relay import Copies
from tests.support.shard.tuning_cells import Asked, Write

DETAILS = {"logprobs": True}
PAD = 0
LENGTHS = (6, 3)  # lengths of the prompts


class Case:
    """Checkpoint with prompts of random embeddings, and its answers to a few inputs with each prompt and
    without one."""

    def __init__(self, name: str, root: Path, write: Write = write_model) -> None:
        self.directory, config = root / name, CASES[name]()
        write(self.directory, config)
        self.oracle = PromptOracle(self.directory, config, root / f"{name}-prompts")
        self.copies, self.digests = Copies(str(root / f"{name}-shard")), {"": ""}
        self.lengths = {"": (0, 0)}  # of the decoder's and the encoder's part
        _, middle, long = draw_inputs()
        middle = middle[:5]  # so short that no sequence crosses a length at which rotary positions change
        if self.oracle.is_encoder_decoder:
            self.asked = list(self._ask_both(middle, long))
        else:
            self.asked = list(self._ask_decoder(middle, long))

    def _ask_decoder(self, middle: list[int], long: list[int]) -> Iterator[Asked]:
        for name, length in zip("ab", LENGTHS, strict=True):
            self._keep(name, {"decoder": self.oracle.draw(length, 1)})
            yield Asked(middle, name, self.oracle.answer(middle, length, 1))
        yield Asked(long, "a", self.oracle.answer(long, LENGTHS[0], 1))
        yield Asked([], "a", self.oracle.answer_to_nothing(LENGTHS[0], 1))
        yield Asked(middle, "", self.oracle.answer(middle, 0, 1))

    def _ask_both(self, middle: list[int], long: list[int]) -> Iterator[Asked]:
        encoder, decoder = self.oracle.draw(LENGTHS[0], 1), self.oracle.draw(LENGTHS[1], 2)
        prompts = {"e": {"encoder": encoder}, "d": {"decoder": decoder}}
        prompts["b"] = prompts["e"] | prompts["d"]
        for name, prompt in prompts.items():
            self._keep(name, prompt)
        yield Asked(middle, "e", self.oracle.answer(middle, LENGTHS[0], 1))
        yield Asked(middle, "d", self.oracle.answer_with(middle, prompts["d"]))
        yield Asked(middle, "b", self.oracle.answer_with(middle, prompts["b"]))
        yield Asked(long, "b", self.oracle.answer_with(long, prompts["b"]))
        yield Asked([], "e", self.oracle.answer_with([], prompts["e"]))
        yield Asked(middle, "", self.oracle.answer_with(middle, {}))

    def _keep(self, name: str, prompt: dict[str, Tensor]) -> None:
        self.copies = self.copies.put("prompt", prompt, {})
        self.digests[name] = self.copies.digests[-1]
        self.lengths[name] = len(prompt.get("decoder", ())), len(prompt.get("encoder", ()))

    def request(self, asked: Asked) -> Request:
        num_decoder, num_encoder = self.lengths[asked.content]
        prompt, encoder = asked.token_ids, list[int]()
        if self.oracle.is_encoder_decoder:
            prompt, encoder = [self.oracle.start_token_id], [PAD] * num_encoder + asked.token_ids
        options = {"details": DETAILS, "prompt_digest": self.digests[asked.content]}
        return Request([PAD] * num_decoder + prompt, NEW_TOKENS, encoder_token_ids=encoder, **options)
