"""Tests how much of a message is read, whatever its size."""

from tgis.pb import generation_pb2 as pb
from tgis.router.api.fmaas.messages import MAX_ITEMS, TOO_MANY_REQUESTS, read_batch, read_single


def test_the_texts_of_a_batch_beyond_every_limit_are_not_read() -> None:
    for num, is_read in ((MAX_ITEMS, True), (MAX_ITEMS + 1, False)):
        call = read_batch(pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")] * num))
        assert len(call.texts) == num, "the concurrency limit counts them"
        assert set(call.texts) == {"a" if is_read else ""}
        assert call.refusal == ("" if is_read else TOO_MANY_REQUESTS)


def test_lists_are_read_up_to_the_refused_length() -> None:
    texts = ["a"] * (MAX_ITEMS + 100)
    choice = pb.DecodingParameters.StringChoices(choices=texts)
    params = pb.Parameters(
        stopping=pb.StoppingCriteria(stop_sequences=texts), decoding=pb.DecodingParameters(choice=choice)
    )
    call = read_single(pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a"), params=params))
    assert len(call.parameters.stop_sequences) == MAX_ITEMS + 1
    assert call.parameters.guided is not None
    assert len(call.parameters.guided.choices) == MAX_ITEMS + 1
