"""What a client may ask for, and text out of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_job import Sampling

__all__ = ["BadRequest", "Completion", "Text"]

IGNORED = {"user", "metadata", "store"}  # changes nothing about the answer
FIELDS = {
    *("model", "prompt", "max_tokens", "temperature", "seed", "stream", "return_token_ids"),
    *IGNORED,
}
NEUTRAL: Mapping[str, object] = {  # OpenAI's defaults: said aloud they ask for nothing
    **{"n": 1, "best_of": 1, "echo": False, "top_p": 1, "logprobs": None, "stop": None},
    **{"suffix": None, "logit_bias": None, "presence_penalty": 0, "frequency_penalty": 0},
    **{"stream_options": None},
}


class BadRequest(Exception):
    """What is wrong with it, for the client."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked request. Greedy unless a temperature is given; ``return_token_ids``, as in vLLM,
    adds the tokens to each choice."""

    model: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stream: bool
    return_token_ids: bool

    @classmethod
    def read(cls, body: Mapping[str, Any], tokenizer: Any) -> Completion:
        """Raises BadRequest; a field that isn't served is refused rather than ignored."""
        for name, value in body.items():
            if name not in FIELDS and not (name in NEUTRAL and value in (NEUTRAL[name], None)):
                raise BadRequest(f"{name}={value!r} is not served here")
        temperature = _given(body, "temperature", 0.0)
        if type(temperature) not in (int, float) or not 0 <= temperature <= 2:
            raise BadRequest(f"temperature {temperature!r}: a number from 0 to 2")
        for name in ("stream", "return_token_ids"):
            if type(_given(body, name, False)) is not bool:
                raise BadRequest(f"{name} {body[name]!r}: true or false")
        seed = body.get("seed")
        if seed is not None and not (_is_int(seed) and 0 <= seed < 1 << 63):
            raise BadRequest(f"seed {seed!r}: a whole number")
        max_tokens = _given(body, "max_tokens", 16)
        if not _is_int(max_tokens) or max_tokens < 1:
            raise BadRequest(f"max_tokens {max_tokens!r}: a whole number from 1 on")
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise BadRequest("model: the base model's name, or the id of an adapter")
        return cls(
            model,
            _prompt(body.get("prompt"), tokenizer),
            max_tokens,
            Sampling(float(temperature), seed),
            stream=_given(body, "stream", False),
            return_token_ids=_given(body, "return_token_ids", False),
        )


def _given(body: Mapping[str, Any], name: str, default: Any) -> Any:
    """What the client has said; null is as good as nothing."""
    value = body.get(name)
    return default if value is None else value


def _prompt(prompt: object, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if isinstance(prompt, list) and all(map(_is_int, prompt)):
        return prompt
    raise BadRequest("prompt: a string, or a list of token ids (one prompt a request)")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Text:
    """Text of tokens as they come. What may still change (the first bytes of a character) is held
    back until it can't."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._sent = 0

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """The piece of text that is certain now."""
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        certain = text if is_last else text.rstrip("\ufffd")
        piece = certain[self._sent :]
        self._sent += len(piece)
        return piece
