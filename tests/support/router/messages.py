"""Requests to the public service."""

from tgis.pb import generation_pb2 as pb

PROMPT = "The quick brown fox"


def single(text: str = PROMPT, **params: object) -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=pb.Parameters(**params))


def batch(*texts: str, **params: object) -> pb.BatchedGenerationRequest:
    requests = [pb.GenerationRequest(text=text) for text in texts]
    return pb.BatchedGenerationRequest(requests=requests, params=pb.Parameters(**params))


def stopping(max_new_tokens: int, **more: object) -> pb.StoppingCriteria:
    return pb.StoppingCriteria(max_new_tokens=max_new_tokens, **more)
