"""A worker's memory by tag: what sleep gives back, and waking takes again.

Owns the three ways: a CPU's pages are dropped where they lie; a GPU's memory of an engine that may sleep is virtual
(`octavo.device.virtual_memory`); that of another one stays, and sleep is refused by name. Does not know why or when
anybody sleeps. Invariants: addresses never change; a move that fails leaves all tags as they were and says why; values
that are to be kept are on the host before any memory goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from octavo.cache.plan import show_bytes
from octavo.config.engine_config import Resolved
from octavo.config.settings import ConfigError
from octavo.ops.native.memory import drop_pages
from octavo.ops.placement import Allocate

if TYPE_CHECKING:
    from octavo.device.virtual_memory import Pages, VirtualMemory

_LOG = logging.getLogger(__name__)
WEIGHTS, CACHE = "weights", "kv_cache"
Keeps = Mapping[str, bool]
"""Tags whose memory is to go, in this order -> whether their values are to come back."""


class WorkerMemory(Protocol):
    """One worker's."""

    moves: bool
    """Whether memory may go and come behind addresses that others were told of, as a network card is."""

    def allocator(self, tag: str, *, always_kept: bool = False) -> Allocate | None:
        """Where memory of this tag comes from; None: from torch.

        always_kept: values come back however deep the sleep was: nobody sends them.
        """

    def going(self, keeps: Keeps) -> list[str]:
        """The tags whose memory would go. Raises ValueError where it cannot be given back."""

    def sleep(self, keeps: Keeps) -> str:
        """Give memory back; or why that cannot be, and then nothing has changed."""

    def wake(self, tags: Sequence[str]) -> str:
        """Take it again, with the values that were kept; or why not, and then these tags sleep on."""


class HostMemory:
    """A CPU's: what is in the host's memory cannot be kept anywhere else."""

    moves = False

    def __init__(self, tensors: Callable[[str], list[torch.Tensor]]) -> None:
        """`tensors`: those of a tag, once they are there."""
        self._tensors = tensors

    def allocator(self, tag: str, *, always_kept: bool = False) -> Allocate | None:
        """See WorkerMemory."""
        return None

    def going(self, keeps: Keeps) -> list[str]:
        """See WorkerMemory."""
        return [tag for tag, comes_back in keeps.items() if not comes_back]

    def sleep(self, keeps: Keeps) -> str:
        """See WorkerMemory."""
        given = sum(drop_pages(tensor) for tag in self.going(keeps) for tensor in self._tensors(tag))
        _LOG.info("%s were given back", show_bytes(given))
        return ""

    def wake(self, tags: Sequence[str]) -> str:
        """See WorkerMemory: pages come as they are touched."""
        return ""


class LastingMemory:
    """A GPU's, of an engine that was not started to sleep."""

    moves = False

    def allocator(self, tag: str, *, always_kept: bool = False) -> Allocate | None:
        """See WorkerMemory."""
        return None

    def going(self, keeps: Keeps) -> list[str]:
        """See WorkerMemory."""
        if keeps:
            raise ValueError(
                "sleep: an engine on a GPU gives memory back only if it was started with enable_sleep_mode: set "
                "--enable-sleep-mode, or use level 0, which stops scheduling"
            )
        return []

    def sleep(self, keeps: Keeps) -> str:
        """See WorkerMemory."""
        self.going(keeps)
        return ""

    def wake(self, tags: Sequence[str]) -> str:
        """See WorkerMemory."""
        return ""


class MovingMemory:
    """A GPU's, whose addresses stay."""

    moves = True

    def __init__(self, pages: Pages, spare: Callable[[], object] = torch.cuda.empty_cache) -> None:
        """`spare`: gives back what torch keeps for later."""
        self._pages, self._give_spare = pages, spare
        self._parts: dict[tuple[str, bool], VirtualMemory] = {}  # (tag, whether it is always kept)

    def allocator(self, tag: str, *, always_kept: bool = False) -> Allocate | None:
        """See WorkerMemory."""
        from octavo.device.virtual_memory import VirtualMemory

        return self._parts.setdefault((tag, always_kept), VirtualMemory(self._pages)).empty

    def going(self, keeps: Keeps) -> list[str]:
        """See WorkerMemory."""
        return list(keeps)

    def sleep(self, keeps: Keeps) -> str:
        """See WorkerMemory."""
        chosen = [(part, always or keeps[tag]) for (tag, always), part in self._parts.items() if tag in keeps]
        saved = [part for part, comes_back in chosen if comes_back and not part.is_saved]
        try:
            for part in saved:
                part.save()
        except RuntimeError as error:
            for part in saved:
                part.forget()
            wanted = show_bytes(sum(part.num_bytes for part in saved))
            return (
                f"sleep: the host's memory does not hold {wanted} of weights: free some, or sleep at level 2 ({error})"
            )
        for part, comes_back in chosen:
            if not comes_back:
                part.forget()
        given = sum(part.give_back() for part, _ in chosen)
        self._give_spare()
        _LOG.info("%s of a GPU's memory were given back", show_bytes(given))
        return ""

    def wake(self, tags: Sequence[str]) -> str:
        """See WorkerMemory. Weights first: new ones may be on their way."""
        order = sorted((tag != WEIGHTS, not always, tag) for tag, always in self._parts if tag in tags)
        parts = [self._parts[tag, not other] for _, other, tag in order]
        away = [part for part in parts if part.is_away]
        taken: list[VirtualMemory] = []
        try:
            for part in away:
                part.take_again()
                taken.append(part)
        except torch.OutOfMemoryError:
            for part in taken:
                part.give_back()
            wanted = show_bytes(sum(part.num_bytes for part in away))
            return (
                f"wake_up: {wanted} of the GPU's memory are needed for {', '.join(tags)}, and others have it: free it "
                "there, then wake up again; until then the engine sleeps as it did"
            )
        for part in parts:
            part.restore()
        return ""


def make_memory(resolved: Resolved, tensors: Callable[[str], list[torch.Tensor]]) -> WorkerMemory:
    """What a worker on this device has. tensors: those of a tag, once they are there. Raises ConfigError."""
    if resolved.device == "cpu":
        return HostMemory(tensors)
    if not resolved.enable_sleep_mode:
        return LastingMemory()
    from octavo.device.cuda_pages import CudaPages
    from octavo.ops.compile.driver import DriverError

    try:
        return MovingMemory(CudaPages(torch.device(resolved.device)))
    except DriverError as error:
        limit = f"this GPU's driver has no virtual memory: {error}"
        raise ConfigError("enable_sleep_mode", True, limit, "leave it out: an engine then sleeps at level 0") from None
