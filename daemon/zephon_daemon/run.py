"""One run as a state machine: what to write, to whom, and which rounds may be delivered. It does no I/O.

Events are methods (a reader joined, a task's outcome, a slot came back); each returns instructions, which the
engine's shell carries out in order. So every interleaving can be played in one process.

A lane goes through its epochs alone: it is produced as soon as the run has begun that epoch, and written to its ring
once every reader of its group has asked for that epoch. A round is released to the readers when every lane that takes
part is known to reach it (`zephon.lanes.released_rounds`), unless arithmetic gave the totals beforehand.

A run always begins at its origin, the state that was loaded, if any: so rounds end where they always did. Readers that
were attached to an engine before say where they stand (`zephon.transport.statement`). Once all readers of a group are
here its lanes are placed: each at the reader that is furthest behind. A batch is written for those only that have not
had it. That holds at any time, whatever the lane was doing before.

A rank that got a batch right before an engine's death may wait for the others in a collective, and comes back only once
these have got theirs. So after a while those that are here go on without it (`go_without`): a group's lanes are placed
where its readers stand that came, and those of a group of which nobody came stand in (`zephon_daemon.stand_ins`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zephon.errors import ProtocolError
from zephon.frontiers import Checkpoint, Frontier, beginnings, steps_done
from zephon.lanes import batch_end, batch_round, owned_lanes
from zephon.plan import Plan
from zephon.producer import LaneProducer
from zephon.transport.layout import measure
from zephon.transport.protocol import Announced, BatchReady, LanesTold, LaneTotal, ReadersLeft, Released
from zephon.transport.rings import ALONE_AT_ONCE, LARGE_RING, Slot
from zephon.transport.statement import Statement
from zephon.windows import AnyTask, Outcome, samples_a_task
from zephon.words import many
from zephon_daemon.feeding import Feeding
from zephon_daemon.gates import ENDLESS, Gate, Gates
from zephon_daemon.instructions import DropRing, Instruction, MakeRing, Tell, Write
from zephon_daemon.lane import Lane, Reader
from zephon_daemon.lane_rings import LaneRings
from zephon_daemon.named_work import batch_of
from zephon_daemon.others import ANNOUNCEMENTS_KEPT, Others
from zephon_daemon.stand_ins import StandIns


class Run:
    """A pipeline's run under one topology. `groups` are those known to come; others are added when they join.

    `ring_bytes` is what all of its rings should take together at most.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        dp_degree: int,
        strategy: str = "contiguous",
        checkpoint: Checkpoint | None = None,
        groups: tuple[int, ...] = (),
        slots: int | None = None,
        task_samples: int | None = None,
        ring_bytes: int | None = None,
    ) -> None:
        self.plan = plan
        self.task_samples = task_samples or samples_a_task(plan.chunk_size, plan.sample_bytes)
        self.first_epoch = checkpoint.epoch if checkpoint else 0
        self.starts = checkpoint.lanes if checkpoint else beginnings(plan.lanes, plan.settings.drop_last)
        self.owned = [owned_lanes(plan.lanes, dp_degree, group, strategy) for group in range(dp_degree)]
        self.readers: dict[int, Reader] = {}
        self.expected: dict[int, int] = {}
        self.lanes: dict[int, Lane] = {}
        self.rings = LaneRings(slots, ring_bytes, self.lanes)
        self._feeding = Feeding(plan, self.lanes, self.starts, self.first_epoch, self.task_samples)
        self.others = Others(plan)
        self._unplaced: set[int] = set()
        self._came: set[int] = set()  # groups whose lanes were ever here for their ranks, or whose ranks have died
        self._gates = Gates(plan, self.starts, self.first_epoch, self.owned)
        self._stand_ins = StandIns(plan, self._gates, self.others, self.readers, self.starts, self.first_epoch)
        self._wanted_epoch = self.first_epoch
        for group in groups:
            self._start_group(group)

    # Events

    def join(
        self, client: int, group: int, group_readers: int, statement: Statement | None = None
    ) -> list[Instruction]:
        """A client will read the lanes of a group: from the run's origin, or from where it says it stands."""
        reader = self.readers[client] = Reader(client, group, stated=statement)
        self.expected[group] = group_readers
        self._unplaced.add(group)
        self._stand_ins.groups.discard(group)
        out: list[Instruction] = []
        if statement is None:
            reader.come({n: (self.first_epoch, self.starts[n].place) for n in self.owned[group]})
            self._start_group(group)
            self._came.add(group)
        else:
            if statement.stands.keys() != set(self.owned[group]):
                raise ProtocolError(f"client {client} of group {group} states lanes {sorted(statement.stands)}")
            reader.come({n: (statement.at.epoch, stands) for n, stands in statement.stands.items()})
            reader.rounds = statement.rounds
            out += self._know(statement.totals, statement.released, group=group)
        return [*out, *self._history(client), *self._place(group)]

    def expect(self, group: int, readers: int) -> list[Instruction]:
        """So many readers of the group are left, those included that have not come yet.

        Where all have died, none waits for what others get, and the lanes stand in for nobody: the others are held, as
        when ranks die alone.
        """
        self.expected[group] = max(1, readers)
        if not readers:
            self._came.add(group)
            self._stand_ins.groups.discard(group)
        return self._place(group) + [step for lane in self._lanes_of(group) for step in self._advance(lane)]

    @property
    def waits_for_ranks(self) -> bool:
        """Whether ranks that came back wait for others that have not."""
        stated = {reader.group for reader in self.readers.values() if reader.stated is not None}
        return not stated.isdisjoint(self._unplaced) or bool(self._stand_ins.needed(self.missing_groups(), self._came))

    def go_without(self) -> list[Instruction]:
        """Ranks that came back have waited for others, which may be waiting for them: they go on without these."""
        stated = {reader.group for reader in self.readers.values() if reader.stated is not None}
        out: list[Instruction] = []
        for group in sorted(stated & self._unplaced):
            self._stand_ins.limit(group)
            out += self._place(group, without=True)
        for group in self._stand_ins.needed(self.missing_groups(), self._came):
            self._stand_ins.begin(group)
            for number in self.owned[group]:
                epoch, start = self._stand_ins.last_known(number)
                producer = LaneProducer(self.plan, epoch, number, start, self.task_samples)
                lane = self.lanes.setdefault(number, Lane(number, group, producer, start.place, start.records))
                lane.restart(producer, start.place)
                lane.announced = 0
                out += self._advance(lane)
        return out

    def read_there(self, groups: Sequence[int], lost: Sequence[int] = ()) -> None:
        """These groups read from the other engines of the run now, where their lanes need nobody to stand in.

        Those that are `lost` did from one that has died.
        """
        self.others.read_there(groups, lost)
        self._stand_ins.groups.difference_update(groups)

    def begin(self, client: int, epoch: int, past: int = 0) -> list[Instruction]:
        """A client is ready for an epoch, `past` records of each lane after the run's beginning."""
        reader = self.readers[client]
        latest = max(reader.epoch, self.first_epoch, reader.stated.at.epoch if reader.stated is not None else 0)
        if not max(reader.epoch, self.first_epoch) <= epoch <= latest + 1:
            raise ProtocolError(f"client {client} asks for epoch {epoch} after epoch {reader.epoch}")
        resumes = reader.epoch < 0 and reader.stated is not None and reader.stated.at.epoch == epoch
        reader.epoch, reader.rounds, reader.past = epoch, reader.rounds if resumes else 0, past
        self._wanted_epoch = max(self._wanted_epoch, epoch)
        self.others.begin(self._wanted_epoch)
        out: list[Instruction] = []
        gate = self._gates.of(epoch, reader.group)
        self._gates.open(gate, epoch)
        for lane in list(self.lanes.values()):
            out += self._advance(lane)
        gate = self._gates.of(epoch, reader.group)
        out.append(Tell(client, self._gates.released(epoch, gate)))
        return out

    def leave(self, client: int) -> list[Instruction]:
        """A client is gone; what it held is free."""
        reader = self.readers.pop(client, None)
        out: list[Instruction] = []
        if reader is not None:
            left = self.expected[reader.group] = max(1, self.expected[reader.group] - 1)
            out += [Tell(r.client, ReadersLeft(left)) for r in self.readers.values() if r.group == reader.group]
            for lane in self._lanes_of(reader.group):
                if lane.ring is not None:
                    lane.ring.drop_reader(client)
            out += self._place(reader.group)
            for lane in self._lanes_of(reader.group):
                out += self._divide(lane) or self._advance(lane)
        return out

    def waits(self, client: int, lane_number: int, epoch: int, stands: int) -> list[Instruction]:
        """A client waits for a lane's batch, and has given back what it does not hold."""
        self.readers[client].waits = lane_number, (epoch, stands)
        lane = self.lanes.get(lane_number)
        return [] if lane is None else self._divide(lane)

    def returned(
        self, client: int, slots: Iterable[tuple[int, int, int]], epoch: int, rounds: int
    ) -> list[Instruction]:
        """A client gave slots back: (lane, generation, index) each."""
        reader = self.readers[client]
        if epoch == reader.epoch:
            reader.rounds = rounds
        freed: dict[int, Lane] = {}
        for number, generation, index in slots:
            lane = self.lanes.get(number)
            if lane is None or lane.ring is None:
                raise ProtocolError(f"client {client} returns a slot of lane {number}, which has no ring")
            if lane.ring.returned(generation, index, client):
                freed[number] = lane
        out: list[Instruction] = []
        for lane in freed.values():  # where other readers still hold the slots nothing has changed
            out += self._fill(lane)
        for group in self._stand_ins.groups:
            for lane in self._lanes_of(group):
                out += self._fill(lane)
        return out

    def outcome(self, lane_number: int, epoch: int, number: int, outcome: Outcome) -> list[Instruction]:
        """A task's outcome. One that the lane has no use for any more is dropped."""
        lane = self.lanes[lane_number]
        if number < lane.first_task:
            return []
        stream, of_front = lane.producer.stream, lane.producer.is_of_front(number - lane.first_task)
        before = stream.produced - stream.to_drop  # what a replay leaves out is made, too
        lane.producer.accept(number - lane.first_task, outcome)
        self._feeding.made(stream.produced - stream.to_drop - before, of_front)
        return self._advance(lane)

    def tell_lanes(self) -> None:
        """Other engines have lanes of the run, too: what they must know of these is in `others` from now on."""
        self.others.tell_again()
        self.others.begin(self._wanted_epoch)
        for lane in self.lanes.values():
            for announcement in lane.producer.announcements[: lane.announced]:
                self.others.announce(Announced(lane.number, lane.epoch, *announcement))
            self._tell_reached(lane)
        if self.plan.settings.even_ends:
            for released in self._gates.final():
                self.others.release(released)

    def hear(self, told: LanesTold) -> list[Instruction]:
        """Another engine of the run tells of its lanes."""
        self.others.heard(told)
        out: list[Instruction] = [Tell(c, window, droppable=True) for window in told.announced for c in self.readers]
        if self.plan.settings.even_ends:
            out += self._know(told.totals, told.released, told.reached, ours=False)
        else:
            for total in told.totals:
                out += self._tell_total(total, ours=False)
        if told.begun > self._wanted_epoch:
            self._wanted_epoch = told.begun
            for lane in list(self.lanes.values()):
                out += self._advance(lane)
        return out

    def unsaid(self, lane: int) -> list[str]:
        """What the lane's operators have reported, apart from tasks, since it was last asked."""
        producer = self.lanes[lane].producer
        said, producer.unsaid = producer.unsaid, []
        return said

    # What the scheduler asks

    def choose(self, worker: int, workers: int) -> tuple[float, int] | None:
        """The lane whose next task suits worker number `worker` of `workers` best, with the lane's runway."""
        return self._feeding.choose(worker, workers)

    def next_task(self, lane: int) -> tuple[int, AnyTask] | None:
        """The lane's next task, with its sequence number."""
        at = self.lanes[lane]
        found = at.producer.next_task(self._feeding.closed)
        if found is None:
            return None
        at.handed_out += 1
        return at.first_task + found[0], found[1]

    def takes_borrowed(self, lane_number: int, epoch: int, number: int) -> bool:
        """Whether an outcome may lie in memory that is given back right after: it is consumed at once."""
        lane = self.lanes[lane_number]
        return number < lane.first_task or lane.producer.is_next(number - lane.first_task)

    def waits_for(self, lane_number: int) -> str:
        """What a lane waits for, in words."""
        lane = self.lanes.get(lane_number)
        if lane is None:
            return "its group to attach"
        missing = self.missing_readers(lane.group)
        if missing and (not self._is_placed(lane.group) or self._stand_ins.holds(lane, missing)):
            return f"{many(missing, 'more rank')} of group {lane.group} to attach"
        if self._audience(lane, lane.stands + 1) is None:
            return "its ranks to begin the epoch"
        if lane.ring is not None and (not lane.ring.free or lane.ring.alone >= ALONE_AT_ONCE):
            holder = self._holding_back(lane)
            return holder or "the trainer"
        if lane.producer.outstanding:
            return "workers"
        if lane.producer.ended:
            return self._holding_back(lane) or "nothing"
        return "a free worker"

    def left_out(self) -> dict[int, int]:
        """Records that no round of an epoch holds, of the epochs whose end is known."""
        return self._gates.left_out()

    def rounds(self, reader: Reader) -> tuple[int, int, int | None]:
        """Rounds that a reader has delivered of its epoch, in all its epochs, and how many its epoch has if known.

        Those before a resume are among them.
        """
        if reader.epoch < self.first_epoch:
            return 0, 0, None
        gate, size = self._gates.of(reader.epoch, reader.group), self.plan.microbatch_size
        of_epoch = steps_done(0, gate.most, max(0, gate.rounds), size) if gate.final else None
        return (
            steps_done(0, gate.most, reader.rounds, size),
            steps_done(reader.past, gate.most, reader.rounds, size),
            of_epoch,
        )

    def missing_readers(self, group: int) -> int:
        """How many ranks of a group have not attached. A group of which nobody came counts as one."""
        here = sum(reader.group == group for reader in self.readers.values())
        return max(0, self.expected.get(group, 1) - here)

    def missing_groups(self) -> list[int]:
        """Groups of which nobody has attached."""
        present = {*self.others.groups, *(reader.group for reader in self.readers.values())}
        return [group for group in range(len(self.owned)) if group not in present]

    def check_invariants(self) -> None:
        """What must hold after every event."""
        for lane in self.lanes.values():
            assert lane.written <= lane.producer.stream.produced
            assert lane.written == lane.producer.stream.first
            if lane.ring is not None:
                lane.ring.check_invariants()
        self._feeding.check_invariants()

    # Inside

    def _start_group(self, group: int) -> None:
        for number in self.owned[group]:
            if number not in self.lanes:
                start = self.starts[number]
                producer = LaneProducer(self.plan, self.first_epoch, number, start, self.task_samples)
                self.lanes[number] = Lane(number, group, producer, start.place, start.records)

    def _lanes_of(self, group: int) -> list[Lane]:
        return [self.lanes[number] for number in self.owned[group] if number in self.lanes]

    def _is_placed(self, group: int) -> bool:
        return group not in self._unplaced and any(reader.group == group for reader in self.readers.values())

    def _place(self, group: int, *, without: bool = False) -> list[Instruction]:
        """Put a group's lanes at the reader that is furthest behind, once all are here, or `without` the others."""
        here = [reader for reader in self.readers.values() if reader.group == group]
        if group not in self._unplaced or not here or (self.missing_readers(group) and not without):
            return []
        self._unplaced.discard(group)
        self._came.add(group)
        out: list[Instruction] = []
        for number in self.owned[group]:
            slowest = min(here, key=lambda reader: reader.places[number])
            lane, (epoch, stands) = self.lanes.get(number), slowest.places[number]
            # Records are known of where a reader came; further on the lane has been for it, and gets there by itself.
            if lane is None or lane.place != (epoch, stands) == slowest.came[number]:
                start = slowest.stated.at.lanes[number] if slowest.stated is not None else self.starts[number]
                producer = LaneProducer(self.plan, epoch, number, start, self.task_samples)
                if lane is None:
                    lane = self.lanes[number] = Lane(number, group, producer, stands, start.records)
                else:
                    lane.restart(producer, stands)
                lane.announced = 0  # other groups may know none but an earlier window
            lane.renew = lane.ring is not None
            out += self._advance(lane)
        return out

    def _know(
        self,
        totals: Sequence[LaneTotal],
        released: Sequence[Released],
        reached: Sequence[Sequence[int]] = (),
        *,
        group: int = 0,
        ours: bool = True,
    ) -> list[Instruction]:
        """Take in what an engine before this one said to a reader of the group, or what another one says now."""
        out: list[Instruction] = []
        said = {each.epoch: each for each in released}
        for each in said.values():
            if ours and self.plan.settings.even_ends:
                self.others.release(each)
        ends = {(total.epoch, total.lane): total.records for total in totals}
        for epoch, number, records in [*((e, n, records) for (e, n), records in ends.items()), *reached]:
            gate = self._gates.of(epoch, group)
            if number in gate.produced:
                gate.produced[number] = max(gate.produced[number], records)
                gate.ended |= {number} if (epoch, number) in ends else set()
        for total in totals:
            out += self._tell_total(total, ours=ours)
        epochs = {epoch for epoch, _ in ends} | {epoch for epoch, _, _ in reached} | said.keys()
        for epoch in epochs:
            gate = self._gates.of(epoch, group)
            before = gate.rounds, gate.final
            told = said.get(epoch)
            if told is not None:
                gate.rounds, gate.final = max(gate.rounds, told.rounds), gate.final or told.final
                gate.stated = told if told.final else gate.stated
            self._gates.open(gate, epoch)
            if before != (gate.rounds, gate.final):
                out += self._tell_released(gate, epoch)
                for lane in list(self.lanes.values()):
                    if gate.final or not self.plan.settings.drop_last or lane.group in self._stand_ins.groups:
                        out += self._advance(lane)
        return out

    def _history(self, client: int) -> Iterator[Tell]:
        """What was announced before a client came."""
        for lane in self.lanes.values():
            for announcement in lane.producer.announcements[: lane.announced]:
                yield Tell(client, Announced(lane.number, lane.epoch, *announcement), droppable=True)
        for message in self.others.history():
            yield Tell(client, message, droppable=isinstance(message, Announced))

    def _advance(self, lane: Lane) -> list[Instruction]:
        """Do for a lane whatever can be done now."""
        return [*self._announce(lane), *self._release(lane), *self._fill(lane)]

    def _fill(self, lane: Lane) -> list[Instruction]:
        """Write what a lane has come to, and go on to its next epoch if that was all."""
        out = self._write(lane)
        if self._may_turn_over(lane):
            lane.restart(LaneProducer(self.plan, lane.epoch + 1, lane.number, Frontier(), self.task_samples), 0)
            out += self._advance(lane)
        if lane.ring is not None:
            out += [DropRing(lane.number, generation) for generation in lane.ring.retired()]
        return out

    def _may_turn_over(self, lane: Lane) -> bool:
        """Whether the lane is done with its epoch and the next one is wanted."""
        if self._wanted_epoch <= lane.epoch or self._stand_ins.holds(lane, self.missing_readers(lane.group)):
            return False
        here = [reader for reader in self.readers.values() if reader.group == lane.group]
        if here and lane.group not in self._unplaced and all(reader.epoch > lane.epoch for reader in here):
            return True
        gate = self._gates.of(lane.epoch, lane.group)
        return gate.final and self._round(lane) > gate.rounds

    def _announce(self, lane: Lane) -> Iterator[Instruction]:
        producer = lane.producer
        for announcement in producer.announcements[lane.announced :]:
            message = Announced(lane.number, lane.epoch, *announcement)
            self.others.announce(message)
            yield from [Tell(client, message, droppable=True) for client in self.readers]
        lane.announced = len(producer.announcements)
        if lane.announced > 2 * ANNOUNCEMENTS_KEPT:
            del producer.announcements[:-ANNOUNCEMENTS_KEPT]
            lane.announced = ANNOUNCEMENTS_KEPT
        if producer.ended and not lane.total_told:
            lane.total_told = True
            yield from self._tell_total(LaneTotal(lane.number, lane.epoch, producer.stream.produced, producer.skipped))

    def _tell_total(self, total: LaneTotal, *, ours: bool = True) -> list[Instruction]:
        """Tell everybody a lane's total, once."""
        return [Tell(client, total) for client in self.readers] if self.others.total(total, ours=ours) else []

    def _tell_reached(self, lane: Lane) -> None:
        gate, produced = self._gates.of(lane.epoch, lane.group), lane.producer.stream.produced
        if self.plan.settings.even_ends and gate.rounds != ENDLESS:
            enough = 1 if lane.ring is None else max(1, lane.ring.generation.slots // 2)
            self.others.reach(lane.epoch, lane.number, produced, gate.most, self.plan.microbatch_size, enough)
        if not produced:
            self.others.search(lane.epoch, lane.number, lane.producer.skipped)

    def _release(self, lane: Lane) -> list[Instruction]:
        """Bring the gate of the lane's epoch up to date; tell its readers if rounds were released."""
        gate = self._gates.of(lane.epoch, lane.group)
        gate.produced[lane.number] = max(gate.produced.get(lane.number, 0), lane.producer.stream.produced)
        if lane.producer.ended:
            gate.ended.add(lane.number)
        if not gate.final:
            self._tell_reached(lane)
        before = gate.rounds, gate.final
        self._gates.open(gate, lane.epoch)
        if before == (gate.rounds, gate.final):
            return []
        out = self._tell_released(gate, lane.epoch)
        if not self.plan.settings.drop_last:  # lanes that had run out may have short batches to write
            for other in self.lanes.values():
                if other is not lane and other.epoch == lane.epoch and other.producer.ended:
                    out += self._write(other)
        return out

    def _tell_released(self, gate: Gate, epoch: int) -> list[Instruction]:
        scope = set(gate.produced)
        message = self._gates.released(epoch, gate)
        return [
            Tell(r.client, message)
            for r in self.readers.values()
            if r.epoch == epoch and not scope.isdisjoint(self.owned[r.group])
        ]

    def _round(self, lane: Lane) -> int:
        """The round that the lane's next batch belongs to."""
        most, size = self._gates.of(lane.epoch, lane.group).most, self.plan.microbatch_size
        return batch_round(batch_end(lane.stands, most, size), most, size)

    def _write(self, lane: Lane) -> list[Instruction]:
        """Write as many of the lane's batches as there are records and slots for."""
        if lane.group in self._stand_ins.groups:
            self._stand_ins.pass_over(lane)
            return []
        if not self._is_placed(lane.group):
            return []
        out: list[Instruction] = []
        gate, stream = self._gates.of(lane.epoch, lane.group), lane.producer.stream
        # Who came anew gets a ring of its own: that before may be full of what others hold while they wait for it.
        while lane.ring is None or lane.renew or (lane.ring.free and lane.ring.alone < ALONE_AT_ONCE):
            until = batch_end(lane.stands, gate.most, self.plan.microbatch_size)
            count = until - lane.written if lane.stands == lane.written else 0
            short = len(stream) < count or lane.stands != lane.written
            if short and not (
                lane.producer.ended and not self.plan.settings.drop_last and self._round(lane) <= gate.rounds
            ):
                break
            if lane.producer.ended and gate.final and self._round(lane) > gate.rounds:
                break
            readers = self._audience(lane, until)
            if readers is None:
                break
            if readers:
                out += self._write_one(lane, count, readers)
            else:  # who had yet to get it has died meanwhile
                stream.take(count)
                lane.written = stream.first
            lane.stands = until
            place = lane.place
            for client in readers:
                self.readers[client].places[lane.number] = place
        return out

    def _audience(self, lane: Lane, until: int) -> tuple[int, ...] | None:
        """The clients for the lane's batch that ends at `until`: all of its group but those that have had it.

        None while one of them has not begun the epoch.
        """
        due, epoch = [], lane.epoch
        for reader in self.readers.values():
            if reader.group == lane.group and reader.places[lane.number] < (epoch, until):
                if reader.epoch < epoch:
                    return None
                if reader.epoch == epoch:
                    due.append(reader.client)
        return tuple(due)

    def _write_one(self, lane: Lane, count: int, readers: tuple[int, ...]) -> list[Instruction]:
        block = lane.producer.take(count)
        layout = measure(block)
        records = lane.producer.stream.first - lane.written
        out: list[Instruction] = []
        if lane.ring is None or lane.renew:
            # Of a first batch that is very large nothing says that others will be.
            nbytes = layout.nbytes if layout.nbytes <= LARGE_RING else 0
            out.append(self.rings.begin(lane, nbytes, self._readers_of(lane)))
        assert lane.ring is not None
        slot: Slot | None
        if lane.ring.outgrows(layout.nbytes) or self.rings.too_large(layout.nbytes, lane):
            slot = lane.ring.acquire_alone(layout.nbytes)
            named = batch_of(self.plan, lane, block, records)
            out.append(MakeRing(lane.number, slot.generation, layout.nbytes, 1, self._readers_of(lane), named))
        else:
            if not lane.ring.fits(layout.nbytes):
                out.append(self.rings.begin(lane, layout.nbytes, self._readers_of(lane)))
            slot = lane.ring.acquire(layout.nbytes)
        assert slot is not None
        lane.ring.publish(slot, readers)
        ready = BatchReady(
            lane.number, lane.epoch, slot.generation, slot.index, layout.nbytes, lane.written, records
        )
        lane.written += records
        out.append(Write(slot, layout, ready, readers))
        return out

    def _divide(self, lane: Lane) -> list[Instruction]:
        """Go on in a ring of which each reader has a part, if they hold all of this one."""
        here = [reader for reader in self.readers.values() if reader.group == lane.group]
        return self._advance(lane) if self.rings.divide(lane, here) else []

    def _readers_of(self, lane: Lane) -> tuple[int, ...]:
        return tuple(r.client for r in self.readers.values() if r.group == lane.group)

    def _holding_back(self, lane: Lane) -> str | None:
        """Whether readers wait for other groups' lanes rather than train."""
        gate = self._gates.of(lane.epoch, lane.group)
        if gate.final or gate.rounds == ENDLESS:
            return None
        slow = min(gate.produced, key=lambda n: gate.produced[n])
        if all(r.rounds >= gate.rounds for r in self.readers.values() if r.group == lane.group):
            missing = self.missing_groups()
            if left := [group for group in missing if group in self._came | self.others.came]:
                return f"groups {left}, whose ranks have left the run"
            return f"groups {missing} to attach" if missing else f"lane {slow} of another group"
        return None
