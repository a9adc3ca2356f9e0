"""The passes of the training compute what a head computes when it drafts."""

import torch

from bench.eagle3_training import NUM_PASSES, Eagle3Head, TappedText, TextBatch
from bench.speculator_files import cross_entropy
from tests.support.shard.draft_heads import HEAD_DIM, HEADS, INNER, KV_HEADS, attend, feed_forward, rms

WIDTH, VOCAB_SIZE, NUM_TOKENS = 24, 50, 12
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}


def draw_text(seed: int) -> TappedText:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=random)
    inner, states = (torch.randn(NUM_TOKENS, n * WIDTH, generator=random) for n in (3, 1))
    return TappedText(ids, inner, states, prompt_len=3)


def make_head() -> Eagle3Head:
    torch.manual_seed(0)
    known = torch.arange(0, VOCAB_SIZE, 2)
    embedding = torch.randn(VOCAB_SIZE, WIDTH)
    return Eagle3Head(SIZES, embedding, torch.randn(len(known), WIDTH), known, [1, 2, 3])


@torch.inference_mode()
def test_a_pass_continues_with_the_heads_own_states() -> None:
    head, text = make_head(), draw_text(1)
    t = {f"{name}.weight": each for name, each in zip(head.names, head.weights, strict=True)}
    batch = TextBatch.of([draw_text(2), text])
    everywhere = torch.ones_like(batch.counts)
    passes = [scores.unflatten(0, batch.counts.shape) for scores in head.run(batch, everywhere)]
    tokens = head.embedding[text.token_ids[1:]]
    for number in range(NUM_PASSES):
        for first in range(NUM_TOKENS - 2 - number):
            states = text.inner[: first + 1] @ t["fc.weight"].T
            for _ in range(number + 1):
                normed = rms(states, t["midlayer.hidden_norm.weight"])
                token = rms(tokens[: len(states)], t["midlayer.input_layernorm.weight"])
                x = states + attend(torch.cat((token, normed), 1), t, "midlayer.self_attn")
                x = x + feed_forward(rms(x, t["midlayer.post_attention_layernorm.weight"]), t, "midlayer.mlp")
                states = torch.cat((states, x[-1:]))
            expected = rms(states[-1], t["norm.weight"]) @ t["lm_head.weight"].T
            torch.testing.assert_close(passes[number][1, first + number], expected, rtol=1e-4, atol=1e-4)


def test_places_of_answers_count() -> None:
    longer = draw_text(1)
    shorter = TappedText(longer.token_ids[:8], longer.inner[:8], longer.states[:8], prompt_len=3)
    batch = TextBatch.of([longer, shorter])
    # Place i predicts token i + 2, and the first token of the answer is token 3.
    assert [row.nonzero()[:, 0].tolist() for row in batch.counts] == [[*range(1, 10)], [*range(1, 6)]]
    assert batch.states[1, 5].equal(longer.states[6])
    assert batch.token_ids[1, 5] == longer.token_ids[6]


def test_the_loss_falls() -> None:
    head = make_head()
    model_head = 3 * torch.randn(len(head.known), WIDTH)
    batch = TextBatch.of([draw_text(seed) for seed in range(4)])
    wanted = batch.states[batch.counts] @ model_head.T
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        scores = [*head.run(batch, batch.counts)]
        loss = torch.stack([cross_entropy(each, wanted) for each in scores]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
