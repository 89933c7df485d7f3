"""The output items of a response: reasoning and messages, in the order in which the model wrote them.

Owns their shape, and what a stream says of each: that it begins, each piece of it, and that it is done. Knows neither
numbers of events nor the response around them. Invariant: the items of a stream are those of the whole response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

Event = tuple[str, dict[str, Any]]  # its type, and its fields but for the number


@dataclasses.dataclass(slots=True)
class Item:
    """One stretch of an answer: a message, or the reasoning before it."""

    id: str
    index: int
    is_reasoning: bool
    text: str = ""

    @property
    def kind(self) -> str:
        """What its events are named after."""
        return "reasoning_text" if self.is_reasoning else "output_text"

    def place(self) -> dict[str, Any]:
        """Where an event of its text belongs."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """Its content."""
        of_message: dict[str, Any] = {} if self.is_reasoning else {"annotations": [], "logprobs": []}
        return {"type": self.kind, "text": self.text, **of_message}

    def shape(self, status: str) -> dict[str, Any]:
        """The item as it stands in a response; one that has just begun is empty."""
        content = [] if status == "in_progress" else [self.part()]
        if self.is_reasoning:
            return {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content}
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class Items:
    """Grows with the answer."""

    def __init__(self, name: str) -> None:
        """`name`: what the items' ids have in common."""
        self._name = name
        self._items: list[Item] = []

    def take(self, stretches: Iterable[tuple[bool, str]]) -> list[Event]:
        """Pieces of the answer, each of reasoning or of the message. What a stream says of them."""
        events: list[Event] = []
        for is_reasoning, text in stretches:
            if not self._items or self._items[-1].is_reasoning is not is_reasoning:
                events += self._close("completed") + self._begin(is_reasoning)
            item = self._items[-1]
            if not text:
                continue
            item.text += text
            of_message: dict[str, Any] = {} if is_reasoning else {"logprobs": []}
            events.append((f"response.{item.kind}.delta", {**item.place(), "delta": text, **of_message}))
        return events

    def end(self, status: str) -> list[Event]:
        """The answer is over; without a word it is an empty message. What a stream says of it."""
        return ([] if self._items else self.take([(False, "")])) + self._close(status)

    def whole(self, status: str) -> list[dict[str, Any]]:
        """All items; `status`: the last one's, the others are completed."""
        last = len(self._items) - 1
        return [item.shape(status if item.index == last else "completed") for item in self._items]

    def _close(self, status: str) -> list[Event]:
        """The last item is done."""
        if not self._items:
            return []
        item = self._items[-1]
        of_message: dict[str, Any] = {} if item.is_reasoning else {"logprobs": []}
        return [
            (f"response.{item.kind}.done", {**item.place(), "text": item.text, **of_message}),
            ("response.content_part.done", {**item.place(), "part": item.part()}),
            ("response.output_item.done", {"output_index": item.index, "item": item.shape(status)}),
        ]

    def _begin(self, is_reasoning: bool) -> list[Event]:
        index = len(self._items)
        behind = f"_{index}" if any(item.is_reasoning is is_reasoning for item in self._items) else ""
        item = Item(f"{'rs' if is_reasoning else 'msg'}_{self._name}{behind}", index, is_reasoning)
        self._items.append(item)
        return [
            ("response.output_item.added", {"output_index": index, "item": item.shape("in_progress")}),
            ("response.content_part.added", {**item.place(), "part": item.part()}),
        ]
