"""Drawn: the tokens that a sampler drew, as one pack, beside the sampler's log-probabilities of them.

Owns which element of a trainer's result is of which drawn token, so that a loop's ratio is one line over all of them,
without padding. Does not know how samplers tell what they drew (`completion.py`). Invariant: `old`, `logprobs`, `pick`
and `spread` have one element for each drawn token, in one order: completion by completion, token by token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.rl.autograd.logprob import Support
from octavo.rl.pack import NO_TOKEN, Pack
from octavo.rl.rollouts.completion import Completion, Mask, of_answers, of_ids, of_outputs
from octavo.rl.scoring import logprobs


class Drawn:
    """Completions, the pack of those that hold tokens, and what belongs to each drawn token.

    `completions`: all, in the order in which the sampler told them. `pack`: prompts and tokens of those with at least
    one token; `targets` [the pack's tokens] int64, the drawn tokens where they follow, so that prompts cost no output
    head. `old`: [drawn] float32, the sampler's log-probabilities. `places`: [drawn] int64, the element of a result over
    the pack that is of a drawn token.
    """

    def __init__(
        self,
        completions: Iterable[Completion],
        *,
        device: torch.device | str = "cpu",
        fields: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`device`: the model's. fields: as Pack's, [completions] or [completions, tokens], for attention mods.

        Raises ValueError where no token was drawn, and for fields that do not fit.
        """
        self.completions = tuple(completions)
        self._fields = dict(fields or {})
        for name, table in self._fields.items():
            if len(table) != len(self.completions):
                raise ValueError(
                    f"fields[{name!r}] must be {len(self.completions)}, one a completion, got {len(table)}"
                )
        self.lengths = tuple(len(each.token_ids) for each in self.completions)
        kept = [number for number, length in enumerate(self.lengths) if length]
        if not kept:
            raise ValueError(f"no token was drawn: {len(self.lengths)} completions, all of them empty")
        packed = [self.completions[number] for number in kept]
        prompts = [len(each.prompt) for each in packed]
        self.pack = Pack.of(
            [[*each.prompt, *each.token_ids] for each in packed],
            device=device,
            fields={name: table[kept] for name, table in self._fields.items()},
            prompt_lengths=prompts,
        )
        device = self.pack.device
        firsts = [place.token + prompt - 1 for place, prompt in zip(self.pack.places, prompts, strict=True)]
        ranges = [torch.arange(first, first + self.lengths[number]) for first, number in zip(firsts, kept, strict=True)]
        self.places = torch.cat(ranges).to(device)
        self.old = torch.tensor([value for each in packed for value in each.logprobs]).to(device, torch.float32)
        self.targets = torch.full((self.pack.num_tokens,), NO_TOKEN, device=device)
        self.targets[self.places] = self.pack.next_tokens()[self.places]

    @classmethod
    def of(
        cls,
        outputs: Sequence[Any],
        *,
        device: torch.device | str = "cpu",
        fields: Mapping[str, Tensor] | None = None,
    ) -> Drawn:
        """Of what `LLM.generate` gave: the n completions of the first prompt, then those of the next.

        Raises ValueError for outputs without log-probabilities, unfinished ones, and parts of a stream.
        """
        return cls(of_outputs(outputs), device=device, fields=fields)

    @classmethod
    def of_answers(
        cls,
        answers: Sequence[Mapping[str, Any]],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        device: torch.device | str = "cpu",
        fields: Mapping[str, Tensor] | None = None,
    ) -> Drawn:
        """Of a server's answers, as JSON says them: /inference/v1/generate, /v1/completions, SGLang's /generate.

        prompts: token ids, one list for each answer; None: the answers tell them (/v1/completions, return_token_ids).
        Raises ValueError for answers that lack ids or log-probabilities; it names what to ask for.
        """
        return cls(of_answers(answers, prompts), device=device, fields=fields)

    @classmethod
    def of_ids(
        cls,
        prompts: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        sampling_masks: Sequence[Mask | None] | None = None,
        *,
        device: torch.device | str = "cpu",
        fields: Mapping[str, Tensor] | None = None,
    ) -> Drawn:
        """Of lists that run side by side, without padding: a prompt's ids, the drawn ids, their log-probabilities.

        sampling_masks: of each completion one list of ids for each of its tokens, or None. Raises ValueError for lists
        of different lengths.
        """
        return cls(of_ids(prompts, token_ids, logprobs, sampling_masks), device=device, fields=fields)

    @property
    def token_ids(self) -> list[Sequence[int]]:
        """What was drawn, of each completion: those without tokens among them."""
        return [each.token_ids for each in self.completions]

    def logprobs(self, model: nn.Module, temperature: float = 1.0, support: Support | None = None) -> Tensor:
        """[drawn] float32, with gradients: what a converted model says of the drawn tokens; `octavo.rl.logprobs`.

        The sampler's own, in bits, under the same weights: with temperature 1 and no support where it tells raw
        log-probabilities; with those of the draw where it tells processed ones.
        """
        return self.pick(logprobs(model, self.pack, self.targets, temperature, support).logprobs)

    def pick(self, values: Tensor) -> Tensor:
        """Of values over the pack, [its tokens, ...], those of the drawn tokens: [drawn, ...]."""
        if len(values) != self.pack.num_tokens:
            raise ValueError(
                f"values must be [{self.pack.num_tokens}, ...], one a token of the pack, got {len(values)}"
            )
        return values[self.places]

    def spread(self, numbers: Tensor | Iterable[float]) -> Tensor:
        """One number for each completion, an advantage say -> [drawn] float32: its own for each of its tokens.

        Raises ValueError for another count: completions without tokens have a number too.
        """
        values = numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers))
        if values.shape != (len(self.lengths),):
            given = list(values.shape)
            raise ValueError(f"numbers must be [{len(self.lengths)}], one for each completion, got {given}")
        repeats = torch.tensor(self.lengths, device=self.pack.device)
        return values.to(self.pack.device, torch.float32).repeat_interleave(repeats)

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [drawn, ...] -> those of each completion, which may be none."""
        return list(values.split(self.lengths))

    def part(self, numbers: Tensor | Iterable[int]) -> Drawn:
        """Some of the completions, a microbatch say: by number, in this order, or by one bool for each of all.

        Raises ValueError where they hold no token, for a number that is not there, and for another count of bools.
        """
        own = _numbers(numbers, len(self.completions))
        fields = {name: table[own] for name, table in self._fields.items()}
        return Drawn([self.completions[number] for number in own], device=self.pack.device, fields=fields)

    @functools.cached_property
    def support(self) -> Tensor:
        """[the pack's tokens, K] int64: the ids that could be drawn, padded with NO_TOKEN; none where nothing was cut.

        For `logprobs(model, temperature, drawn.support)` of an engine that tells processed log-probabilities. Raises
        ValueError where the sampler was not asked for masks.
        """
        found = [mask for each in self._packed() for mask in _told(each.sampling_mask, each, "sampling mask")]
        sizes = torch.tensor([len(mask or ()) for mask in found])
        rows = torch.full((len(found), max(int(sizes.max()), 1)), NO_TOKEN)
        flat = list(itertools.chain.from_iterable(mask or () for mask in found))
        rows[torch.arange(rows.shape[1]) < sizes[:, None]] = torch.tensor(flat, dtype=torch.int64)
        return self._over_pack(rows)

    @functools.cached_property
    def routed_experts(self) -> Tensor:
        """[the pack's tokens, layers, ranks] int16: who computed each token; -1 for a sequence's last, which never ran.

        Raises ValueError where the sampler was not asked for them.
        """
        rows = []
        for each in self._packed():
            own = torch.as_tensor(_told(each.routed_experts, each, "routed experts")).to(torch.int16)
            count = len(each.prompt) + len(each.token_ids) - 1
            if len(own) != count:
                raise ValueError(f"{each.where} has routed experts of {len(own)} tokens, expected {count}")
            rows += [own, torch.full_like(own[:1], -1)]
        return torch.cat(rows).to(self.pack.device)

    def _packed(self) -> list[Completion]:
        return [each for each in self.completions if each.token_ids]

    def _over_pack(self, values: Tensor) -> Tensor:
        """Values [drawn, K] -> [the pack's tokens, K], NO_TOKEN where no drawn token follows."""
        found = torch.full((self.pack.num_tokens, values.shape[1]), NO_TOKEN, device=self.pack.device)
        found[self.places] = values.to(self.pack.device)
        return found


def _told(value: Any, completion: Completion, what: str) -> Any:
    """What a completion was to tell. Raises ValueError where it does not."""
    if value is None:
        setting = f"return_{what.replace(' ', '_')}"
        raise ValueError(f"{completion.where} has no {what}: ask for it with SamplingParams({setting}=True)")
    return value


def _numbers(given: Tensor | Iterable[int], count: int) -> list[int]:
    """Numbers of completions, of which there are `count`, from numbers or a mask."""
    numbers = [each.item() if hasattr(each, "item") else each for each in given]
    if numbers and all(isinstance(each, bool) for each in numbers):
        if len(numbers) != count:
            raise ValueError(f"numbers must be {count} bools, one for each completion, got {len(numbers)}")
        return [number for number, wanted in enumerate(numbers) if wanted]
    wrong = next((each for each in numbers if each not in range(count)), None)
    if wrong is not None:
        raise ValueError(f"numbers must be whole ones in [0, {count - 1}], got {wrong}")
    return numbers
