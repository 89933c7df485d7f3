"""`p2p`: the blocks of one request go from the engine that computed its prompt to the one that goes on with it.

Owns the options, what requests and answers say of each other (`kv_transfer_params`, with vLLM's keys), and the
scheduler's half of both sides. The bytes go over torch.distributed (`worker.p2p`). A router asks the first engine with
`do_remote_decode`, and gives what that answers to the second one. Invariants: blocks are named by a transfer id, never
by a request's; those that are on offer are kept until they are fetched or `kv_transfer_timeout` is over.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import ipaddress
import logging
import struct
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import make_policies
from octavo.config.kv_transfer import EXTRA, Extra, KVTransferConfig, refuse
from octavo.kv_connector import Connector, ConnectorStats, SilentConnector, Transfer, TransferResults
from octavo.kv_connector.orders import EngineSide, Order, Orders
from octavo.kv_connector.peers import NIXL
from octavo.kv_connector.peers.offers import Wanted
from octavo.request.request import FinishReason, Request
from octavo.request.transfer_params import MAX_BLOCKS, REMOTE, Block

if TYPE_CHECKING:
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes
    from octavo.kv_connector.worker.pair import Way

_LOG = logging.getLogger(__name__)
_MAX_EARLY = 1 << 12  # transfer ids that are released before they are on offer
# of vLLM's P2pNcclConnector
_VLLMS = ("proxy_ip", "proxy_port", "http_port", "send_type", "nccl_num_channels", "mem_pool_size_gb")
_ADDRESSES = "remote_addresses"  # of an engine of several ranks, beside the first one's
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class P2P:
    """See Kind."""

    shares_names = True  # the two sides compare what their caches follow from
    answers = True
    moves_states = True
    keys: tuple[str, ...] = ("backend", "num_threads")  # of kv_connector_extra_config
    registers = False  # the cache's memory, with who moves bytes

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        extra = Extra(transfer.extra)
        for key in filter(transfer.extra.__contains__, _VLLMS):
            limit = "belongs to vLLM's proxy and buffers; `octavo router` names the engines to each other"
            raise refuse(f"{EXTRA}.{key}", transfer.extra[key], limit, "drop it")
        extra.check_keys(self.keys)
        if transfer.produces and _is_every_address(transfer.kv_ip):
            limit = "is told to peers, who cannot reach that"
            raise refuse("kv_ip", transfer.kv_ip, limit, "give the address at which they reach this machine")
        self._backend = extra.choice("backend", "gloo", ("gloo", "nccl", "ipc"))
        self._names_blocks = self._backend == "ipc"
        self._transfer, self._num_threads = transfer, extra.number("num_threads", 2, 1, 64)

    def secret(self) -> bytes:
        """See Kind. Names stay within each engine: blocks go by transfer ids."""
        return b""

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        return _P2PConnector(engine, names_blocks=self._names_blocks)

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.p2p import P2PWorker

        if self.registers and cache.moves:
            limit = "registers the cache's memory once, and enable_sleep_mode takes it away"
            raise refuse("kv_connector", self._transfer.kv_connector, limit, "set one of the two, or kv_connector p2p")
        return P2PWorker(cache, self._transfer, self.make_way(cache), num_threads=self._num_threads)

    def make_way(self, cache: CacheBytes) -> Way:
        """How the bytes go. Raises ConfigError."""
        if self._backend != "gloo" and not cache.on_gpu:
            limit = "moves blocks from GPU to GPU, and this cache is the host's"
            raise refuse(f"{EXTRA}.backend", self._backend, limit, "set gloo, or device cuda")
        if self._backend == "ipc":
            return self._make_ipc(cache)
        if self._backend == "nccl":
            from octavo.kv_connector.worker.ways.nccl import NcclWay

            return NcclWay(cache)
        from octavo.kv_connector.worker.ways.gloo import GlooWay

        return GlooWay(cache)

    def _make_ipc(self, cache: CacheBytes) -> Way:
        from octavo.kv_connector.worker.ways.ipc import IpcWay

        if self._transfer.produces and cache.moves:
            limit = "lets peers map the cache's memory, and enable_sleep_mode takes it away"
            raise refuse(f"{EXTRA}.backend", self._backend, limit, "set one of the two, or backend nccl")
        try:
            return IpcWay(cache, gives=self._transfer.produces)
        except RuntimeError as error:
            limit = f"lets peers map the cache's memory, and the driver does not: {error}"
            raise refuse(f"{EXTRA}.backend", self._backend, limit, "set nccl") from None


def _is_every_address(host: str) -> bool:
    """Whether a listener there hears on all of a machine's, and none of them is named."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


class Nixl(P2P):
    """See Kind. As `p2p`, and the bytes go from memory to memory by NIXL."""

    keys = ("num_threads", "transfer_mode", "backends")
    registers = moves_runs = True

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        if all(importlib.util.find_spec(name) is None for name in NIXL):
            install = "pip install 'octavo[nixl]', or `pip install --no-deps nixl-cu13`"
            raise refuse("kv_connector", transfer.kv_connector, "needs the library nixl-cu12 or nixl-cu13", install)
        super().__init__(transfer)
        extra = Extra(transfer.extra)
        self._pushes = extra.choice("transfer_mode", "pull", ("pull", "push")) == "push"
        self._names_blocks = not self._pushes
        backends = extra.names("backends", ("UCX",))
        if backends != ["UCX"]:
            limit = "must be ['UCX']: that no byte comes late, once a transfer was given up, is known of UCX alone"
            raise refuse(f"{EXTRA}.backends", backends, limit)

    def make_way(self, cache: CacheBytes) -> Way:
        """See P2P."""
        from octavo.kv_connector.worker.ways.nixl import NixlWay
        from octavo.kv_connector.worker.ways.nixl_push import NixlPushWay

        return (NixlPushWay if self._pushes else NixlWay)(cache, gives=self._transfer.produces)


def asked_of(request: Request) -> Mapping[str, Any]:
    """The kv_transfer_params of a request."""
    given = (request.params.extra_args or {}).get("kv_transfer_params")
    return given if isinstance(given, Mapping) else {}


class _P2PConnector(SilentConnector):
    """See Connector."""

    def __init__(self, engine: EngineSide, *, names_blocks: bool) -> None:
        """names_blocks: who reads the cache's memory is told what to read, and begins before it is answered."""
        self._transfer, self._groups = engine.transfer, engine.groups
        # a block of another kind may still change behind the last token of an offer
        self._names_blocks = names_blocks and all(
            each.is_attention and each.tokens_per_state == 1 for each in self._groups
        )
        self._policies = make_policies(engine.groups)
        self.offers = engine.transfer.produces
        self._ask, self._orders = engine.ask, Orders(engine.ask)
        self._addresses: list[tuple[str, int]] = engine.ask("address") if engine.transfer.produces else []
        self._offered: dict[
            str, tuple[str, str]
        ] = {}  # request that has ended -> its transfer id, and its offer's name
        self._open: set[str] = set()  # transfer ids on offer
        self._by_order: dict[int, str] = {}
        self._early = collections.OrderedDict[str, None]()  # transfer ids that were released, and are not on offer yet
        self._used: set[str] = set()  # requests, unfinished ones, whose offer has been used
        self._fetches: dict[int, Wanted] = {}  # by order

    def match(self, request: Request, num_local: int) -> int:
        """See Connector."""
        asked = asked_of(request)
        if not asked.get("do_remote_prefill") or not self._transfer.consumes or request.request_id in self._used:
            return 0
        lacking = [name for name in REMOTE if not asked.get(name)]
        if not lacking and not self._reached(asked):
            lacking = ["remote_host and remote_port of a listener that kv_peers allows"]
        if lacking:
            self._used.add(request.request_id)
            _LOG.warning("request %s has no %s: its prompt is computed here", request.request_id, ", ".join(lacking))
            return 0
        count = asked["remote_num_tokens"]
        if not isinstance(count, int) or count > request.num_tokens:
            return 0
        return max(count - num_local, 0)

    def _reached(self, asked: Mapping[str, Any]) -> list[tuple[str, int]]:
        """Where the other engine's ranks are; empty: that is not said, or is where this one does not connect to."""
        found = _addresses(asked)
        return found if all(self._transfer.peers.trust(host) for host, _ in found) else []

    def shorter(self, request: Request, num_local: int, end: int) -> int:
        """See Connector. What is kept for a request that goes on at the end of an offer, or one token before it."""
        last = asked_of(request)["remote_num_tokens"] - 1
        is_there = all(policy.first_needed(end) >= policy.first_needed(last) for policy in self._policies)
        return end if is_there else num_local

    def allocated(self, load: Transfer) -> None:
        """See Connector."""
        self._used.add(load.request.request_id)  # an offer is good once: who is preempted computes
        asked = asked_of(load.request)
        blocks, places = _moving(load, self._groups)
        wanted = Wanted(
            transfer_id=str(asked["transfer_id"]),
            digest=_digest(load),
            version=load.version,
            places=places,
            end=load.end,
            position=min(load.end, load.request.num_tokens - 1),
            fetch=f"{self._transfer.engine_id} {load.number}",
            addresses=self._reached(asked),
            engine_id=str(asked.get("remote_engine_id") or ""),
            offer=str(asked.get("remote_offer") or ""),
            blocks=_named(asked, places),
        )
        self._fetches[load.number] = wanted
        self._orders.begin(_order(load, blocks, wanted, is_load=True))

    def loads_no_more(self, request: Request) -> None:
        """See Connector. Who has its blocks on offer hears so."""
        asked = asked_of(request)
        if not asked.get("do_remote_prefill") or not self._transfer.consumes:
            return
        is_used = request.request_id in self._used
        self._used.add(request.request_id)
        if request.finished:
            self._used.discard(request.request_id)
        if not is_used and asked.get("transfer_id") and (addresses := self._reached(asked)):
            self._give_up(addresses, str(asked.get("remote_engine_id") or ""), str(asked["transfer_id"]))

    def _give_up(self, addresses: Sequence[tuple[str, int]], engine_id: str, transfer_id: str) -> None:
        """Tell who has blocks on offer that they will not be fetched, beside the steps."""
        self._ask("give_up", addresses, engine_id, transfer_id)

    def _end_fetch(self, number: int, *, failed: bool) -> None:
        wanted = self._fetches.pop(number, None)
        if wanted is not None and failed:
            self._give_up(wanted.addresses, wanted.engine_id, wanted.transfer_id)

    def release(self, transfer_ids: Sequence[str]) -> int:
        """See Connector."""
        begun = set(self._by_order.values())
        known = [each for each in transfer_ids if each in self._open]
        self._early.update(dict.fromkeys(each for each in transfer_ids if each not in begun))
        while len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)
        if found := [each for each in known if each in begun]:
            self._ask("release", found)
        return len(known)

    def ending(self, save: Transfer) -> dict[str, Any] | None:
        """See Connector."""
        request = save.request
        asked = asked_of(request)
        if not asked.get("do_remote_decode") or not self._transfer.produces:
            return None
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return None
        transfer_id = str(asked.get("transfer_id") or uuid.uuid4())
        if transfer_id in self._early:
            del self._early[transfer_id]
            return None
        if transfer_id in self._open:
            _LOG.warning("request %s: its transfer_id is on offer already, so it is not offered", request.request_id)
            return None
        name = uuid.uuid4().hex
        self._offered[request.request_id] = transfer_id, name
        self._open.add(transfer_id)
        host, port = self._addresses[0]
        told = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": self._transfer.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": port,
            "remote_num_tokens": min(request.num_computed, request.num_tokens),
        }
        if len(self._addresses) > 1:
            return {**told, _ADDRESSES: self._addresses}
        tables = [
            list(table[: group.num_written(save.end)]) for group, table in zip(self._groups, save.blocks, strict=True)
        ]
        # a step in flight still writes the last token's K and V: who asks is told of such blocks, behind it
        if self._names_blocks and not request.num_in_flight and sum(map(len, tables)) <= MAX_BLOCKS:
            told |= {"remote_block_ids": tables, "remote_offer": name}
        return told

    def finished(self, save: Transfer) -> bool:
        """See Connector."""
        transfer_id, name = self._offered.pop(save.request.request_id, ("", ""))
        if not transfer_id:
            return False
        if transfer_id in self._early:
            del self._early[transfer_id]
            self._open.discard(transfer_id)
            return False
        blocks, places = _moving(save, self._groups)
        self._by_order[save.number] = transfer_id
        digest, version = _digest(save), save.version
        wanted = Wanted(
            transfer_id=transfer_id, digest=digest, version=version, places=places, end=save.end, offer=name
        )
        self._orders.begin(_order(save, blocks, wanted, is_load=False))
        return True

    def cancel(self, number: int, *, force: bool) -> bool:
        """See Connector."""
        if not self._orders.cancel(number):
            return False
        self._open.discard(self._by_order.pop(number, ""))
        self._end_fetch(number, failed=True)
        return True

    def take_results(self) -> TransferResults:
        """See Connector."""
        done: list[int] = []
        failed: dict[int, frozenset[int]] = {}
        partial: dict[int, frozenset[int]] = {}
        refusal = ""
        for report in self._orders.take():
            refusal = report.refusal or refusal
            self._open.discard(self._by_order.pop(report.number, ""))
            self._end_fetch(report.number, failed=bool(report.failed or report.missed))
            if report.failed or report.missed:
                failed[report.number] = frozenset([*report.failed, *report.missed])
                continue
            done.append(report.number)
            if report.partial:
                partial[report.number] = frozenset(report.partial)
        return TransferResults(done=done, failed=failed, partial=partial, refusal=refusal)

    def wait(self, seconds: float) -> None:
        """See Connector."""
        self._orders.wait(seconds)

    def stats(self) -> ConnectorStats:
        """See Connector."""
        return self._orders.stats()

    def close(self) -> None:
        """See Connector."""
        self._orders.close()


def _addresses(asked: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Where the other engine's ranks are; empty: it does not say so in a form that can be used."""
    try:
        told = asked.get(_ADDRESSES) or [(asked["remote_host"], asked["remote_port"])]
        return msgspec.convert(told, list[tuple[str, _Port]], strict=False)
    except (ValueError, KeyError):
        return []


def _named(asked: Mapping[str, Any], places: Sequence[tuple[int, int]]) -> list[int]:
    """Which blocks of the other engine stand at these places, as the offer says; empty: it does not say so of all."""
    try:
        tables = msgspec.convert(asked.get("remote_block_ids") or [], list[list[Block]])
        blocks = [tables[group][place] for group, place in places]
    except (ValueError, IndexError):
        return []
    return blocks if asked.get("remote_offer") and all(blocks) else []


def _moving(transfer: Transfer, groups: Sequence[CacheGroup]) -> tuple[list[int], list[tuple[int, int]]]:
    """The blocks of a transfer, the last one of each group perhaps not full, and where they stand."""
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    for index, (group, table) in enumerate(zip(groups, transfer.blocks, strict=True)):
        first, last = transfer.start // group.block_size * group.parts.blocks, group.num_written(transfer.end)
        moving = [place for place in range(first, min(last, len(table))) if table[place]]
        blocks += [table[place] for place in moving]
        places += [(index, place) for place in moving]
    return blocks, places


def _digest(transfer: Transfer) -> bytes:
    """Of what the blocks up to the transfer's end were computed from, in one model."""
    request = transfer.request
    tokens = request.tokens[: transfer.end]
    digest = hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16)
    digest.update(f"{request.cache_salt}\0{transfer.version}".encode())
    return digest.digest()


def _order(transfer: Transfer, blocks: list[int], wanted: Wanted, *, is_load: bool) -> Order:
    return Order(number=transfer.number, is_load=is_load, blocks=blocks, wanted=wanted)
