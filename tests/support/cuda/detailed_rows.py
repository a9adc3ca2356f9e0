"""Rows with token details and watermarks that the CPU's sampler and a GPU's kernels sample."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.cuda.sampled_rows import CPU, POISON, Cases, SampledRows
from tests.support.plain_sampling import single
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import MAX_TOP_N, MAX_TOPS, DetailQuestions, DeviceDetails, Flag
from tgis.shard.runner.device.details.copies import CopiedDetails, PendingDetails
from tgis.shard.runner.host_sampler import HostSampler
from tgis.shard.runner.step_response import SampledTokens
from tgis.shard.sampling.grammar import Guides
from tgis.shard.sampling.watermark import pack_green

Kernels = tuple[Callable[..., None], Callable[..., None]]
"""`sample` and `describe`."""


class DetailedCases(Cases):
    """Random rows, of which most want details, and some have watermarks or top-k."""

    def message(self, row: int) -> pb.OpenRow:
        message, rng = super().message(row), self.rng
        message.details.top_n = rng.choice([0, 0, 1, 2, 5, MAX_TOP_N])
        message.details.logprobs = rng.random() < 0.5
        message.details.ranks = rng.random() < 0.5
        message.details.raw = rng.random() < 0.4
        return message

    def sampling(self) -> dict[str, Any]:
        rng, sampling = self.rng, super().sampling()
        if rng.random() < 0.3:
            sampling |= {
                "watermark_gamma": rng.choice([0.25, 0.5, 1e-9]),
                "watermark_delta": single(rng.gauss(0, 2)),
            }
        if not sampling["greedy"] and rng.random() < 0.3:
            sampling["top_k"] = rng.choice([1, 3, 20, self.vocab_size - 1])
        return sampling


class DetailedRows(SampledRows):
    def open(self, message: pb.OpenRow) -> None:
        super().open(message)
        gamma = message.sampling.watermark_gamma
        if gamma:
            last = np.frombuffer(message.token_ids, "<i4")[-1:]
            green = pack_green(last, np.array([gamma]), self.vocab_size)
            self.state.greens[message.row] = torch.from_numpy(green[0])

    def sample_on_cpu(self, logits: Tensor) -> SampledTokens:
        """Sample the next tokens of all rows with the host's sampler."""
        guides = Guides(lambda: None, self.vocab_size)  # type: ignore[arg-type,return-value]
        host = HostSampler(None, None, self.table, guides, is_answering=True)  # type: ignore[arg-type]
        return host._sample_rows(np.arange(len(logits)), logits.clone())

    def sample_on_device(self, kernels: Kernels, logits: Tensor) -> SampledTokens:
        """Return the same, from the kernels' answers."""
        sample, describe = kernels
        num_rows = len(logits)
        answers = torch.full((num_rows, 2), POISON, dtype=torch.int32)
        questions, details = (
            DetailQuestions.empty(*logits.shape, CPU),
            DeviceDetails.empty(num_rows, MAX_TOPS, CPU),
        )
        for tensor in (questions.queries, details.words):
            tensor.fill_(POISON)
        for tensor in (questions.scores, details.logprobs):
            tensor.fill_(torch.nan)
        sample(logits.clone(), self.state, torch.arange(num_rows, dtype=torch.int32), answers, questions)
        describe(questions, details)
        flags = answers[:, 1].numpy()
        kept = np.flatnonzero(flags & Flag.SAMPLED)
        traits = self.table.traits(np.arange(num_rows))
        copied = CopiedDetails(details.words.numpy(), details.logprobs.numpy())
        pending = PendingDetails(traits.wants_details, traits.wanted, [], copied)
        ended = (flags[kept] & Flag.ENDED) != 0
        described = pending.describe(kept, np.arange(num_rows))
        return SampledTokens(kept, kept, answers[:, 0].numpy()[kept], ended, described, [])
