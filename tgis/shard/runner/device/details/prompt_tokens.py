"""Computes the details of prompt tokens on a device, without waiting for it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tgis.shard.kernels.cuda.step_state import DetailQuestions, DeviceDetails, Query
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.runner.device.device_step import DeviceModel
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.device.uploads import Uploads, Words
from tgis.shard.runner.forward import Outputs
from tgis.shard.runner.host_sampler import HEAD_ROWS
from tgis.shard.sampling.logprobs import MAX_TIES, InputSpan


class PromptDetails:
    """Only rank 0 answers, but all ranks must compute the logits together."""

    def __init__(
        self, on: DeviceModel, table: DeviceTable, uploads: Uploads, stream: DeviceStream, is_answering: bool
    ):
        self._on = on
        self._table = table
        self._uploads = uploads
        self._stream = stream
        self._is_answering = is_answering

    def queue(
        self, spans: Sequence[InputSpan], outputs: Callable[[], Outputs], adapters: TokenAdapters | None
    ) -> list[tuple[InputSpan, DeviceDetails | None]]:
        """Queue the details of spans after their forward pass, whose outputs `outputs` returns when it is
        done. Return the memory of the details, or None for rows that want only the ids. Token 0, which has no
        details, is left out."""
        return [(span, self._queue_span(span, outputs, adapters)) for span in spans]

    def _queue_span(
        self, span: InputSpan, outputs: Callable[[], Outputs], adapters: TokenAdapters | None
    ) -> DeviceDetails | None:
        if not self._table.wants_details[span.row]:
            return None
        queries = self._make_queries(span)
        [sent] = self._uploads.send([queries])
        max_tops = MAX_TIES * int(queries[:, Query.TOP_N].max(initial=0))
        details = DeviceDetails.empty(len(queries), max_tops, self._stream.device)

        @torch.inference_mode()
        def describe() -> None:
            for start in range(0, len(queries), HEAD_ROWS):
                part = slice(start, min(start + HEAD_ROWS, len(queries)))
                self._describe(outputs().x, adapters, span.first_x, part, sent, details)

        self._stream.run(describe)
        return details

    def _make_queries(self, span: InputSpan) -> Words:
        token_ids = span.token_ids[1:] if span.start == 0 else span.token_ids
        queries = np.ones((len(token_ids), len(Query)), np.int32)
        queries[:, Query.TOKEN_ID] = token_ids
        queries[:, Query.TOP_N] = self._table.rows["top_n"][span.row]
        return queries

    def _describe(
        self,
        x: Tensor,
        adapters: TokenAdapters | None,
        first_x: int,
        part: slice,
        queries: Tensor,
        details: DeviceDetails,
    ) -> None:
        at = slice(first_x + part.start, first_x + part.stop)
        logits = self._on.model.logits(x[at], adapters and adapters.take(at))
        if self._is_answering:
            questions = DetailQuestions(logits, queries[part])
            self._on.kernels.describe(questions, DeviceDetails(details.words[part], details.logprobs[part]))
