"""Rendezvous: every rank checks that all run the same recipe and library versions before a process group exists.

The ranks exchange facts through the launcher's store, because NCCL fails in strange ways between versions, and the
others would wait for a rank that ends alone until a time-out. If one rank has an error, all get its message and end
together.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

import lowmem_ft
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.knob import as_typed
from lowmem_ft.foundation.system.interrupts import on_interrupt
from lowmem_ft.foundation.system.launch_variables import is_main_process
from lowmem_ft.foundation.system.signals import NOTHING_TRAINED
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.training.processes.error_propagation import meeting_store

PATIENCE = timedelta(minutes=10)
"""Time that a process waits for the others: importing torch from a busy network disk takes minutes."""

MOST_NAMED = 8
"""Maximum number of differences that an error lists; no one reads more of entirely different recipes."""

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


class RankInfo(NamedTuple):
    """The facts that one process reports about itself.

    Args:
        host: the machine's name.
        problems: messages of the errors that stop it; empty: it can train.
        facts: values that have to be equal in all processes, by name.
        gpu: unique name of its GPU, which no other process may have; empty: it trains on a CPU.
    """

    host: str
    problems: Sequence[str] = ()
    facts: Mapping[str, str] = {}
    gpu: str = ""


_meetings: list[Any] = []
"""Store of each rendezvous so far; that of rank 0 may be the server of the others."""


def rendezvous(recipe: Recipe, *, checkpoint: str | None, gpu: str = "") -> None:
    """Wait for all processes of the launch, and check that they are about to do the same.

    Args:
        recipe: this process's recipe.
        checkpoint: the name of the checkpoint that it would resume from.
        gpu: this process's GPU; empty: it trains on a CPU.

    Raises:
        UserError: if one of them reports an error, has a different recipe or versions, or does not arrive, or if two
            have the same GPU.
    """
    facts = {**_versions(), **{path: as_typed(key.value_in(recipe)) for path, key in recipe_keys().items()}}
    facts["the checkpoint to resume from"] = checkpoint or "none"
    _exchange(RankInfo(socket.gethostname(), (), facts, gpu))


def is_first_to_say(text: str) -> bool:
    """Return whether to print a text: the main process before processes meet, then the first rank that has it.

    A launcher ends all ranks, including the main one, as soon as one has ended.
    """
    store = _meetings[-1] if _meetings else meeting_store()
    if store is None:
        return is_main_process()
    try:
        return store.add(f"lowmem_ft said: {text}", 1) == 1
    except RuntimeError:
        return True  # the store is gone with its process, and printing twice is better than not at all


def tell_others(error: UserError) -> None:
    """Send this process's error to the others, so that all end together, unless the rendezvous has already done so.

    Raises:
        UserError: with the errors of all processes, unless all have this same one.
    """
    if not _meetings and "RANK" in os.environ:
        _exchange(RankInfo(socket.gethostname(), error.problems))


def _exchange(own: RankInfo) -> None:
    with explained_joining():
        store, rank, num_processes = next(dist.rendezvous("env://", timeout=PATIENCE))
        _meetings.append(store)
        arrivals = _arrivals(store, own, rank, num_processes)
        problems = [*refusals(arrivals)] or [*differences(arrivals), *_shared_gpus(arrivals)]
        if problems:
            _leave(store, rank, num_processes)
    if problems and tuple(problems) != tuple(own.problems):
        raise UserError(*problems)


def _arrivals(store: Any, own: RankInfo, rank: int, num_processes: int) -> list[RankInfo]:
    """Return the reports of all processes by rank; only those whose digest differs from this one's are read in full."""
    said = json.dumps([own.problems, own.facts], sort_keys=True)
    digest = hashlib.sha256(said.encode()).hexdigest()
    store.set(_key("said", rank), said)
    store.set(_key("digest", rank), json.dumps([own.host, own.gpu, digest]))
    arrivals = []
    for other in range(num_processes):
        try:
            host, gpu, digest_there = json.loads(store.get(_key("digest", other)))
        except dist.DistStoreError as error:
            raise UserError(
                f"All {num_processes} processes of a launch have to start, but process {other} did not within "
                f"{PATIENCE.seconds // 60} minutes. Check its own output: it was not started, has another MASTER_ADDR "
                "or MASTER_PORT, or ended with an error."
            ) from error
        is_same = digest_there == digest
        problems, facts = own[1:3] if is_same else json.loads(store.get(_key("said", other)))
        arrivals.append(RankInfo(host, problems, facts, gpu))
    return arrivals


def _leave(store: Any, rank: int, num_processes: int) -> None:
    """Leave the store; if it is in rank 0, that rank waits up to 10 s until all have read it."""
    gone, deadline = store.add(_key("gone", 0), 1), time.monotonic() + 10
    while rank == 0 and gone < num_processes and time.monotonic() < deadline:
        time.sleep(0.01)
        gone = store.add(_key("gone", 0), 0)


def _key(what: str, rank: int) -> str:
    return f"lowmem_ft {len(_meetings)} {what} {rank}"


def refusals(arrivals: Sequence[RankInfo]) -> Iterator[str]:
    """Yield each problem of any process once, with the ranks that have it unless all have."""
    for problem in dict.fromkeys(problem for arrival in arrivals for problem in arrival.problems):
        ranks = [rank for rank, arrival in enumerate(arrivals) if problem in arrival.problems]
        if len(ranks) == len(arrivals):
            yield problem
        else:
            others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
            where = f"process {ranks[0]} of {len(arrivals)}, on {arrivals[ranks[0]].host}"
            yield f"{problem} (Reported by {where}{others}.)"


def differences(
    arrivals: Sequence[RankInfo],
    way_out: str = "Start all processes with the same settings, files and packages.",
) -> Iterator[str]:
    """Yield a message for each fact that differs between processes, with the first process in which it differs."""
    first = arrivals[0]
    names = list(dict.fromkeys(name for arrival in arrivals for name in arrival.facts))
    differing = [
        name for name in names if any(each.facts.get(name) != first.facts.get(name) for each in arrivals)
    ]
    for name in differing[:MOST_NAMED]:
        value = first.facts.get(name)
        others = [rank for rank, each in enumerate(arrivals) if each.facts.get(name) != value]
        other = arrivals[others[0]]
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        yield (
            f"Every process needs the same {name}, got {value} in process 0 (on {first.host}) and "
            f"{other.facts.get(name)} in process {others[0]} (on {other.host}){more}. {way_out}"
        )
    if len(differing) > MOST_NAMED:
        yield f"{len(differing) - MOST_NAMED} more settings differ: the recipes are different. {way_out}"


def _shared_gpus(arrivals: Sequence[RankInfo]) -> Iterator[str]:
    """Yield a message for each GPU that several processes would share: NCCL refuses that late, in its own words."""
    for gpu in dict.fromkeys(arrival.gpu for arrival in arrivals if arrival.gpu):
        ranks = [rank for rank, arrival in enumerate(arrivals) if arrival.gpu == gpu]
        if len(ranks) > 1:
            host = arrivals[ranks[0]].host
            there = len({arrival.gpu for arrival in arrivals if arrival.host == host})
            yield (
                f"Each process of a launch needs a GPU of its own, got processes {' and '.join(map(str, ranks))} of "
                f"{len(arrivals)} on the same one ({gpu}, on {host}). Start at most {there} there, the number of GPUs "
                f"that they see: `accelerate launch --num_processes {there}`, `torchrun --nproc_per_node={there}`; or "
                "check CUDA_VISIBLE_DEVICES."
            )


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version(), "lowmem_ft": lowmem_ft.__version__}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return {f"version of {name}": version for name, version in versions.items()}


@contextlib.contextmanager
def explained_joining() -> Iterator[None]:
    """Turn torch's errors of a failed rendezvous into the rule, the values seen and the way out.

    A launcher that has lost a process signals the others, which are waiting for it in torch's C++.

    Raises:
        UserError: for each such error.
    """
    try:
        with on_interrupt(NOTHING_TRAINED, in_native_code=True):
            yield
    except dist.DistError as error:
        raise UserError(_not_joined(str(error), os.environ)) from error
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        raise UserError(
            "A launcher sets for each process RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in addition to "
            "LOCAL_RANK. Unset LOCAL_RANK to train in one process, or start several with `accelerate launch` or "
            f"torchrun. torch says: {error}"
        ) from error


def _not_joined(message: str, environment: Mapping[str, str]) -> str:
    """Return the message about processes that cannot find each other.

    Args:
        message: torch's own message.
        environment: the variables of the launch.
    """
    address, port = environment.get("MASTER_ADDR", "unset"), environment.get("MASTER_PORT", "unset")
    place = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    said = message.splitlines()[0] if message else "no more"
    if "EADDRINUSE" in message:
        return (
            f"The processes need a free port for their rendezvous, but that of {place} is in use, for example by "
            "another run. Name another: `accelerate launch --main_process_port 29501 ...`, `torchrun "
            f"--master_port=29501 ...`, or `torchrun --standalone ...` on one machine. torch says: {said}"
        )
    if "imed out" in message or "timed out" in message:
        return (
            f"All processes meet at {place}, but some did not arrive within {PATIENCE.seconds // 60} minutes. Check "
            "that every machine was started with the same address, port and number of machines, that its firewall "
            f"allows the port, and that no process ended early. torch says: {said}"
        )
    return (
        f"The processes could not meet at {place}. Check that the address is the one by which the other machines "
        f"reach the first (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name a network interface). torch says: {said}"
    )
