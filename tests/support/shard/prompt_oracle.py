"""peft's and transformers' greedy answers with soft prompts, one at a time and unpadded, for any family."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.support.greedy import generate
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, describe, load_model

Prompt = Mapping[str, Tensor]  # "decoder" and "encoder", both optional


class PromptOracle:
    """Checkpoint in transformers. peft draws the prompts and stores them in files in `directory`."""

    def __init__(self, checkpoint: Path, config: transformers.PretrainedConfig, directory: Path) -> None:
        self.is_encoder_decoder, self._directory = bool(config.is_encoder_decoder), directory
        self.model = load_model(checkpoint, config)
        if getattr(config.get_text_config(), "hidden_size_per_layer_input", 0):
            embed_virtual_as_padding(self.model)
        if config.model_type == "falcon_h1":
            scale_table(self.model)
        self.start_token_id = self.model.generation_config.decoder_start_token_id

    def draw(self, num_tokens: int, seed: int) -> Tensor:
        """Return embeddings [num_tokens, width] as drawn and saved by peft; the encoder's for an
        encoder-decoder model."""
        torch.manual_seed(seed)
        task = "SEQ_2_SEQ_LM" if self.is_encoder_decoder else "CAUSAL_LM"
        width = self.model.get_input_embeddings().embedding_dim
        sizes = {"token_dim": width, "num_layers": 1, "num_attention_heads": 1}
        config = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=num_tokens, **sizes)
        self._find(num_tokens, seed).parent.mkdir(exist_ok=True)
        peft.get_peft_model(self.model, config).save_pretrained(self._find(num_tokens, seed))
        saved = load_file(self._find(num_tokens, seed) / "adapter_model.safetensors")["prompt_embeddings"]
        return saved[:num_tokens].clone()

    def answer(self, input_ids: list[int], num_tokens: int, seed: int, **settings: Any) -> Answer:
        """Return PeftModel's answer with the prompt that `draw` returned for the same arguments; without a
        prompt for no tokens."""
        model = self.model
        if num_tokens:
            model = self._tune(num_tokens, seed)
        with warnings.catch_warnings():  # it warns of omitted arguments
            warnings.simplefilter("ignore", UserWarning)
            tokens, steps = generate(model, input_ids, max_new_tokens=NEW_TOKENS, **settings)
        return describe(input_ids, tokens, steps)

    @torch.inference_mode()
    def answer_to_nothing(self, num_tokens: int, seed: int, repetition_penalty: float = 1.0) -> Answer:
        """Return PeftModel's answer, with such a prompt, to an input without tokens, which `generate` does
        not support."""
        model = self._tune(num_tokens, seed)
        penalise = transformers.RepetitionPenaltyLogitsProcessor(repetition_penalty)
        tokens, steps = list[int](), list[Tensor]()
        for _ in range(NEW_TOKENS):
            input_ids = torch.tensor([tokens], dtype=torch.int64)
            steps.append(penalise(input_ids, model(input_ids=input_ids).logits[:, -1])[0].log_softmax(-1))
            tokens.append(int(steps[-1].argmax()))
        return describe([], tokens, torch.stack(steps))

    @torch.inference_mode()
    def answer_with(self, input_ids: list[int], prompt: Prompt) -> Answer:
        """Return the answer of an encoder-decoder model whose decoder has virtual tokens before its first
        token."""
        tokens, steps = list[int](), list[Tensor]()
        for _ in range(NEW_TOKENS):
            out = self.model(
                inputs_embeds=self.embed(prompt.get("encoder"), input_ids),
                decoder_inputs_embeds=self.embed(prompt.get("decoder"), [self.start_token_id, *tokens]),
            )
            steps.append(out.logits[0, -1].log_softmax(-1))
            tokens.append(int(steps[-1].argmax()))
        return describe(input_ids, tokens, torch.stack(steps))

    def embed(self, prompt: Tensor | None, token_ids: list[int]) -> Tensor:
        """Return [1, num_virtual + len(token_ids), width]."""
        table = self.model.get_input_embeddings()
        result = table(torch.tensor([token_ids], dtype=torch.int64))
        return result if prompt is None else torch.cat([prompt[None], result], 1)

    def _tune(self, num_tokens: int, seed: int) -> Any:
        model: Any = peft.PeftModel.from_pretrained(self.model, self._find(num_tokens, seed)).eval()
        if model.word_embeddings is None:  # peft looked for them in the part for images
            model.word_embeddings = self.model.get_input_embeddings()
        return model

    def _find(self, num_tokens: int, seed: int) -> Path:
        return self._directory / f"{num_tokens}-{seed}"


def scale_table(model: Any) -> None:
    """Multiply the table by the factor of embeddings, which transformers does not apply to what peft
    embeds."""
    text, table = model.get_decoder(), model.get_input_embeddings()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # it may be the table
    with torch.no_grad():
        table.weight *= text.embedding_multiplier
    text.embedding_multiplier = 1.0


def embed_virtual_as_padding(model: Any) -> None:
    """Give the virtual tokens of a Gemma 4 the layer inputs of the padding token, as transformers does for
    images. From embeddings alone, transformers finds only the ids of embeddings in its table."""
    text = model.get_decoder()
    find = text.get_per_layer_inputs

    def embed(input_ids: Tensor | None, embeddings: Tensor) -> Tensor:
        if input_ids is None:
            table = text.embed_tokens.weight * text.config.hidden_size**0.5
            equal = (embeddings[:, :, None] == table).all(-1)  # [1, num_tokens, vocab_size]
            input_ids = torch.where(equal.any(-1), equal.int().argmax(-1), text.config.pad_token_id)
        result: Tensor = find(input_ids, embeddings)
        return result

    text.get_per_layer_inputs = embed
