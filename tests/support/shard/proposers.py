"""Proposers of drafts that take the place of a shard's speculator."""

from collections.abc import Sequence

import numpy as np

from tgis.shard.runner.row_table import Integers, TokenIds


class ProposerInShard:
    """Propose the tokens that the rows will generate. Every `wrong`-th token of a text is `wrong_id`
    instead."""

    def __init__(self, wrong: int = 4) -> None:
        self.truths: list[list[int]] = []
        self.num_proposed = 0
        self.wrong, self.wrong_id = wrong, 7

    def propose(self, rows: Integers, token_ids: Sequence[TokenIds], max_drafts: Integers) -> list[TokenIds]:
        proposed = []
        for known, limit in zip((ids.tolist() for ids in token_ids), max_drafts.tolist(), strict=True):
            (truth, *_) = (truth for truth in self.truths if truth[: len(known)] == known)
            places = range(len(known), len(truth))
            ids = [self.wrong_id if place % self.wrong == 0 else truth[place] for place in places]
            proposed.append(np.array(ids[:limit], np.int32))
        self.num_proposed += sum(map(len, proposed))
        return proposed
