"""Expected answers of a router in front of fake shards."""

from tests.support.router.fake_shard import EOS, VOCAB_SIZE
from tests.support.router.model_of_shard import next_token
from tests.support.router.router_process import Setup


def expected_tokens(setup: Setup, text: str, max_new_tokens: int) -> list[int]:
    """Return the generated token ids according to the model's rule."""
    tokens: list[int] = setup.tokenizer.encode(text).ids
    num_inputs = len(tokens)
    while len(tokens) < num_inputs + max_new_tokens and (len(tokens) == num_inputs or tokens[-1] != EOS):
        tokens.append(next_token(tokens, VOCAB_SIZE))
    return tokens[num_inputs:]


def expected_text(setup: Setup, tokens: list[int]) -> str:
    text: str = setup.tokenizer.decode(tokens, skip_special_tokens=True)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")
