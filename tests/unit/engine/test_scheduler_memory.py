"""What the batching policy remembers of clients and lanes that have gone."""

from weakref import WeakSet

from app.engine.scheduler import Scheduler


class Name(str):
    """That can be looked for once nobody else has it."""

    __slots__ = ("__weakref__",)


def test_clients_and_lanes_that_came_one_by_one_are_forgotten() -> None:
    """All were kept, and gone through for each batch: 20,000 took it from 30 us to 10 ms."""
    scheduler, kept = Scheduler[str](lambda _: 1, lambda _: 1.0), WeakSet[Name]()
    for number in range(50):
        client, lane = Name(f"client {number}"), Name(f"lane {number}")
        kept |= {client, lane}
        scheduler.add("scan", client=client)
        scheduler.add_tiles("scan", lane, 1)
        assert scheduler.next_batch(0.0) is not None
        scheduler.remove("scan")
    assert len(kept) < 10


def test_client_that_sends_more_and_more_is_not_forgiven_what_it_had() -> None:
    scheduler, served = Scheduler[str](lambda _: 1, lambda _: 1.0), list[str]()
    for name, tiles, client in (("large", 20, "patient"), ("first", 1, "busy")):
        scheduler.add(name, client=client)
        scheduler.add_tiles(name, "lane", tiles)
    for number in range(20):
        scheduler.add(f"another {number}", client="busy")
        scheduler.add_tiles(f"another {number}", "lane", 1)
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        served.extend(batch.requests())
    assert served.count("large") == 10
