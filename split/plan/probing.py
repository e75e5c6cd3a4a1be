"""When a ping to the companion is worth its bytes, and how heavy it is to be: an estimate goes in, bytes come out.

Only where no transfer informs. Budgets of their own for light and for heavy pings, and for a link that became another
one, so that none starves the others; beside these steady ones a small share of what requests moved, since a link that
carries megabytes of them is worth kilobytes of looking when it carries none for a while. Nothing is sent here, and what
comes back is the link's to learn (`link.py`).
"""

from __future__ import annotations

import math
from typing import Final

from split.plan.observation import LinkEstimate

PING_BYTES: Final = 64
PING_COST_BYTES: Final = 256
"""A ping and its pong on the wire: padding, frame, TLS record, TCP/IP headers and acknowledgements both ways."""
PING_BUSY_S: Final = 0.5
"""DESIGN §5: under traffic no estimate is older."""
PING_EARNED_S: Final = 0.25
"""The same while requests have earned it: what stays here notices within three of them that it need not."""
AT_ONCE_S: Final = 0.1
"""After a surprise; it takes two or three to tell what it was."""
PING_IDLE_S: Final = 15.0
BUSY_S: Final = 2.0
"""A decision within so many seconds is traffic."""
BUSY_TURNS: Final = 2.0
PAUSE_GAIN: Final = 0.2
"""Of one pause between two requests in what is taken for the usual one."""
BUSY_MAX_S: Final = 60.0
"""So is one within so many times the pause between the last two, up to this: a device that takes 5 s for a request and
is asked again and again is not idle in between."""
PROBE_BYTES: Final = 32 * 1024
PROBE_BYTES_MIN: Final = 1024
PROBE_BYTES_TELLING: Final = 4096
"""What is saved for, and the least where it was earned: less tells a rate from a round trip only on slow links."""
PROBE_BURST_BYTES: Final = 4 * PROBE_BYTES
PING_BURST_BYTES: Final = 128 * PING_COST_BYTES
"""What may be spent at once after a quiet time: four of the heaviest probes, a minute of pings under traffic."""
PROBE_MS: Final = (5.0, 20.0)
PROBE_RTT_RATIO: Final = 0.25
"""A probe is as heavy as the link carries in so long, within these bounds: six times the jitter of the round trip
(`Link.JITTER_RATIO`), in nobody's way. The slower the link seems, the lighter the probe that shows that it has become
faster, and the longer the bytes last. The first one of a connection is the heaviest: nothing is known yet."""
PROBE_SHARE: Final = 4
"""A probe takes no more than this part of what may be spent at once, so that there is always something left for a
surprise: on a fast link four full ones would be all for half a minute."""
PROBE_BUSY_S: Final = 3.0
"""Under traffic that stays local, the rate is looked at so often."""
PROBE_AGAIN_S: Final = 1.0
"""A second time earlier: the first probe of a connection goes out while models open on both sides, on a device that
has nothing left for it."""
PROBE_EARNED_S: Final = 1.0
"""The same while requests have earned it."""
LOOK_TURNS: Final = 2.5
"""And where they have earned more, in pauses between requests: what stays here notices within five of them, the look
that confirms it included, that it need not."""
EARNED_LASTS_S: Final = 6.0
"""But then what is earned shall last for so long: a link that is slow for a minute is looked at less and less."""
LINK_SHARE: Final = 10.0
"""And no more often than so many times what one takes on the link: a tenth of it is in nobody's way."""
LOOKS: Final = 2
"""So often the rate is looked at once pings have shown that the link is another one, with the heaviest probes: the
first alone would be a surprise, which the second makes a change; where the first is none, that is all. Where one shows
another rate, as often again."""
LOOK_AFTER_S: Final = 0.5
"""And only where no request has crossed for so long: the next one looks itself. What such looks may spend is an hour's
part of the bytes at once, and nobody else may: a link with losses surprises at every turn and has spent the rest when
it gives way to a calm one. Then light probes had to do, which tell of a rate that became ten times higher no more than
their jitter: simulated, a model stayed here for 9 requests (median; 20 and more for a third), now for 2. With 192 KB at
once the seventh link within five minutes was not looked at, and a model stayed here for all of its 19 requests."""
PONG_BYTES: Final = 14_000
"""The heaviest pong that is asked for: what a connection sends at once however long it rested (ten segments of 1,448
bytes, RFC 6928, less frame and TLS records). More would wait for the companion's window, of which nothing is known
here, and pass for a slow way down."""
PONG_BYTES_MIN: Final = 8192
"""The lightest: what is less tells nothing (`change.SHOWS_DOWN_BYTES`)."""
CHANGE_KEPT: Final = 0.5
"""Of what may be spent at once on a link that became another one, pongs leave so much: that the way down alone is back
nothing else shows, and light ones tell it from jitter badly."""
UP_SELDOM: Final = 4
"""So many times less often the rate up is looked at while the rate down is: it is good enough for a plan that would be
chosen but for its reply."""
TRAFFIC_SHARE_HEAVY, TRAFFIC_SHARE_LIGHT = 0.015, 0.005
"""Of the bytes that requests and replies moved, for heavy pings and for light ones."""
TRAFFIC_SAVED_BYTES: Final = 1_000_000
"""What of that is kept at most, of each: minutes without a transfer and they are rare again."""


class Probing:
    """`bytes_per_hour`: what probes and pings may cost together, beside a share of what requests moved; 0: nothing."""

    def __init__(self, bytes_per_hour: float) -> None:
        self._bytes_per_hour = bytes_per_hour
        self._ping_room = _Room(bytes_per_hour / 2, PING_BURST_BYTES)
        self._probe_room = _Room(bytes_per_hour / 4, PROBE_BURST_BYTES)
        self._change_room = _Room(bytes_per_hour / 4, math.inf)
        self._looks = 0
        """Still to be taken since the link was found to be another one."""
        self._moved_at_s = -math.inf
        """When a request crossed this connection last."""
        self._is_scarce = False
        self._probed_at_s = -math.inf
        self._weighed_at_s = -math.inf
        """When the rate was last seen, or asked for."""
        self._out_since_s = -math.inf
        """When that was asked for which is not back."""
        self._weighed_down_at_s = -math.inf
        """The same of the rate down."""
        self._came_down = False
        """Whether the last crossing that weighed on its way down would show that way; False once it was no surprise."""
        self._was_pong = False
        """Whether it was a pong."""
        self._pinged = False
        """Whether another ping was back since: then the next pong tells a rate from a round trip."""
        self._looks_down = 0
        """Taken since the last surprise."""
        self._confirms = False
        """One more is to be taken, of the rate that they have shown."""
        self._down_byte_costs = 1.0
        self._decided_at_s = -math.inf
        self._pause_s = PROBE_BUSY_S
        """Between requests, lately."""
        self._busy_s = BUSY_S
        self._again_after_s = PROBE_BUSY_S

    def spend_at_most(self, bytes_per_hour: float, *, down_byte_costs: float = 1.0) -> None:
        """From now on no more than this, nor than was said at first; `inf`: only that holds. Where it is less than was
        said at first, what requests move adds nothing. `down_byte_costs`: as much as so many bytes that go up."""
        self._down_byte_costs = down_byte_costs
        self._is_scarce = bytes_per_hour < self._bytes_per_hour
        for room in (self._ping_room, self._probe_room):
            if self._is_scarce:
                room.earned = 0.0
        allowed = min(bytes_per_hour, self._bytes_per_hour)
        self._ping_room.bytes_per_hour = allowed / 2
        self._probe_room.bytes_per_hour = self._change_room.bytes_per_hour = allowed / 4

    def connected(self) -> None:
        """A new connection: its rate is worth a look."""
        self._weighed_at_s = self._weighed_down_at_s = self._moved_at_s = self._out_since_s = -math.inf
        self._looks, self._again_after_s = 0, PROBE_AGAIN_S

    def decided(self, now_s: float) -> None:
        """There is traffic."""
        between_s = now_s - self._decided_at_s
        self._busy_s = max(BUSY_S, BUSY_TURNS * between_s) if between_s <= BUSY_MAX_S else BUSY_S
        self._pause_s += PAUSE_GAIN * (min(between_s, PROBE_BUSY_S) - self._pause_s)
        self._decided_at_s = now_s

    def carried(self, up_bytes: int, down_bytes: int, now_s: float) -> None:
        """A transfer or a probe came through: where it had weight, it has shown the rate."""
        if up_bytes >= PROBE_BYTES_MIN:
            self._weighed_at_s, self._out_since_s = now_s, -math.inf
        if down_bytes >= PROBE_BYTES_MIN:
            self._weighed_down_at_s = now_s
        if down_bytes >= PROBE_BYTES_MIN:
            self._was_pong, self._pinged = up_bytes < PROBE_BYTES_MIN, False
            self._came_down = down_bytes >= PONG_BYTES_MIN
        else:
            self._pinged = True

    def changed(self) -> None:
        """Pings have shown that the link is another one: its rate is worth a look. Not while the first looks at this
        connection are still to come: they tell what it is, not that it has become another one."""
        if self._again_after_s == PROBE_BUSY_S or self._moved_at_s > -math.inf:
            self._looks = LOOKS

    def moved(self, crossing_bytes: float, now_s: float) -> None:
        """A request and its reply crossed, of so many bytes: nothing needs to be looked at."""
        self._looks, self._moved_at_s, self._was_pong = 0, now_s, False
        if self._bytes_per_hour > 0.0 and not self._is_scarce:
            self._probe_room.earn(TRAFFIC_SHARE_HEAVY * crossing_bytes)
            self._ping_room.earn(TRAFFIC_SHARE_LIGHT * crossing_bytes)

    def wanted(self, link: LinkEstimate, *, surprised: bool, now_s: float) -> int:
        """Bytes of padding of a ping that would be worth its cost now; 0: none. What is returned counts as sent.

        The round trip is asked for every 0.5 s under traffic and every 15 s otherwise; the rate once after a connect,
        and under traffic a second later again and then every 3 s; both more often with what requests have earned. Both
        at once after a surprise (`surprised`: the last transfer did not fit what was known), and the rate `LOOKS` times
        once the link is another one (`changed`).
        """
        busy = now_s - self._decided_at_s < self._busy_s
        busy_s = PING_EARNED_S if self._ping_room.earned >= PING_COST_BYTES else PING_BUSY_S
        every_s = busy_s if busy else PING_IDLE_S
        looks = self._looks_now(link, surprised=surprised, now_s=now_s)
        at_once = busy and (surprised or looks) and now_s >= self._probed_at_s + AT_ONCE_S
        fresh = min(link.age_s, now_s - self._probed_at_s) < every_s and not at_once
        first = self._first_weight_due(link, now_s)
        if first and (weight := self._look(link, now_s, first=True)):
            return weight
        if looks and at_once and (weight := self._look(link, now_s)):
            self._looks -= 1
            return weight
        weight = self._weight(link, now_s, first=first)
        surprising = at_once and surprised and not self._was_pong
        due = busy and not self._is_out(now_s) and (surprising or now_s >= self._weight_due_at_s(link, weight, now_s))
        if (first or due) and self._probe_room.take(weight + PING_COST_BYTES, now_s):
            self._probed_at_s = self._weighed_at_s = self._out_since_s = now_s
            if not first:
                self._again_after_s = PROBE_BUSY_S
            return weight
        if not fresh and self._ping_room.take(PING_COST_BYTES, now_s):
            self._probed_at_s = now_s
            return PING_BYTES
        return 0

    def again_s(self, link: LinkEstimate, *, surprised: bool, now_s: float) -> float:
        """In so many seconds `wanted` will want what it does not want yet: a look at the rate, or one more after a
        surprise; `inf`: neither."""
        if now_s - self._decided_at_s >= self._busy_s or self._is_out(now_s):
            return math.inf
        weight = self._weight(link, now_s)
        if self._probe_room.left(now_s) < weight + PING_COST_BYTES:
            return math.inf
        at_s = [self._weight_due_at_s(link, weight, now_s)]
        if surprised:
            at_s.append(self._probed_at_s + AT_ONCE_S)
        return min((one - now_s for one in at_s if one > now_s), default=math.inf)

    def pong_wanted(self, link: LinkEstimate, *, surprised: bool, now_s: float) -> int:
        """Bytes of padding that a ping should ask for in its pong, where requests stay here for what a reply takes
        (`Decision.reply_decides`); 0: none. What is returned counts as sent.

        Only under traffic: once after a connect, and then as often as the rate up would be looked at; `LOOKS` times at
        once where what came down was a surprise.
        """
        if now_s - self._decided_at_s >= self._busy_s or math.isinf(link.age_s):
            return 0
        if not surprised:
            self._confirms = self._confirms or self._looks_down > 0
            self._looks_down, self._came_down, self._was_pong = 0, False, False
        doubtful = surprised and self._came_down and self._pinged and self._looks_down < LOOKS
        again = (doubtful or self._confirms) and now_s >= self._probed_at_s + AT_ONCE_S
        first = math.isinf(self._weighed_down_at_s)
        heavy = int(min(max(PROBE_MS[1] / link.down_ms_per_byte, PONG_BYTES_MIN), PONG_BYTES))
        every_s = self._every_s(self._down_byte_costs * heavy, link.down_ms_per_byte, PROBE_BUSY_S)
        if not (again or first or now_s - self._weighed_down_at_s >= every_s):
            return 0
        if again or first:
            self._looks_down, self._confirms = self._looks_down + doubtful, False
            return self._pong(heavy, self._change_room, now_s)
        if self._probe_room.left(now_s) / PROBE_SHARE >= self._down_byte_costs * heavy:
            return self._pong(heavy, self._probe_room, now_s)
        return self._pong(
            heavy, self._change_room, now_s, kept=self._change_room.bytes_per_hour * CHANGE_KEPT
        ) or self._pong(PONG_BYTES_MIN, self._probe_room, now_s)

    def _pong(self, pong_bytes: int, room: _Room, now_s: float, *, kept: float = 0.0) -> int:
        """So many bytes where the room has them and what is `kept` for others; else 0."""
        cost = pong_bytes * self._down_byte_costs + PING_COST_BYTES
        if room.left(now_s) < cost + kept or not room.take(cost, now_s):
            return 0
        self._probed_at_s = self._weighed_down_at_s = now_s
        return pong_bytes

    def _looks_now(self, link: LinkEstimate, *, surprised: bool, now_s: float) -> bool:
        """Whether one of `LOOKS` is to be taken: the second once the first is back and was a surprise."""
        if self._looks == 0 or now_s - self._moved_at_s < LOOK_AFTER_S:
            return False
        if self._looks == LOOKS:
            return True
        if self._is_out(now_s):
            return False
        if not surprised:
            self._looks = 0
        return surprised

    def _look(self, link: LinkEstimate, now_s: float, *, first: bool = False) -> int:
        """Bytes of one of `LOOKS`, or of the first at a connection, which leaves those their bytes while it may be as
        heavy without; 0 where there is nothing left for it."""
        weight = int(min(max(PROBE_MS[1] / link.up_ms_per_byte, PROBE_BYTES_MIN), PROBE_BYTES))
        steady = first and self._probe_room.left(now_s) / PROBE_SHARE >= weight
        if not (self._probe_room if steady else self._change_room).take(weight + PING_COST_BYTES, now_s):
            self._looks = 0
            return 0
        self._probed_at_s = self._weighed_at_s = self._out_since_s = now_s
        return weight

    def _first_weight_due(self, link: LinkEstimate, now_s: float) -> bool:
        """Right after the first ping of a connection nothing is known of the rate."""
        return math.isinf(self._weighed_at_s) and link.age_s < math.inf and now_s - self._probed_at_s >= PING_BUSY_S

    def _is_out(self, now_s: float) -> bool:
        """Whether the last look is still on its way: on a link that became very slow the next would queue behind it,
        and requests behind them. One that was lost, or came back among requests, is waited for no longer than this."""
        return now_s - self._out_since_s < PROBE_BUSY_S

    def _weight(self, link: LinkEstimate, now_s: float, *, first: bool = False) -> int:
        """Bytes of the next steady or earned look."""
        carried_ms = PROBE_MS[1] if first else min(max(PROBE_RTT_RATIO * link.rtt_ms, PROBE_MS[0]), PROBE_MS[1])
        affordable = max(self._probe_room.left(now_s) / PROBE_SHARE, PROBE_BYTES_TELLING)
        least = PROBE_BYTES_TELLING if self._probe_room.earned >= PROBE_BYTES else PROBE_BYTES_MIN
        return int(min(max(carried_ms / link.up_ms_per_byte, least), PROBE_BYTES, affordable))

    def _weight_due_at_s(self, link: LinkEstimate, weight: int, now_s: float) -> float:
        """Of the next look that is not the first; not before the first ping is back, nor while requests cross."""
        if math.isinf(link.age_s) or math.isinf(self._weighed_at_s):
            return math.inf
        every_s = self._every_s(weight, link.up_ms_per_byte, self._again_after_s)
        if now_s - self._weighed_down_at_s < every_s and self._moved_at_s < self._weighed_down_at_s:
            every_s *= UP_SELDOM
        return max(self._weighed_at_s + every_s, self._moved_at_s + min(every_s, LOOK_AFTER_S))

    def _every_s(self, weight: float, ms_per_byte: float, steady_s: float) -> float:
        """Between two looks of so many bytes, where `steady_s` is what the steady budget is spent by."""
        cost, earned = weight + PING_COST_BYTES, self._probe_room.earned
        every_s = PROBE_EARNED_S if earned >= PROBE_BYTES else steady_s
        if earned >= cost:
            every_s = min(max(LOOK_TURNS * self._pause_s, PING_EARNED_S, EARNED_LASTS_S * cost / earned), every_s)
        return max(every_s, LINK_SHARE * cost * ms_per_byte / 1000.0)


class _Room:
    """A token bucket: bytes that may be spent, refilled at a steady rate, never more than a burst; and what was earned
    beside."""

    def __init__(self, bytes_per_hour: float, burst_bytes: float) -> None:
        self.bytes_per_hour = bytes_per_hour
        self.earned = 0.0
        self._burst_bytes = burst_bytes
        self._steady = math.inf
        self._filled_at_s = -math.inf

    def earn(self, more_bytes: float) -> None:
        """Beside the steady ones, up to what is kept."""
        self.earned = min(self.earned + more_bytes, TRAFFIC_SAVED_BYTES)

    def left(self, now_s: float) -> float:
        """What may be spent now."""
        return self._steady_at(now_s) + self.earned

    def take(self, cost: float, now_s: float) -> bool:
        """Spend it if it is there, what was earned last."""
        self._steady, self._filled_at_s = self._steady_at(now_s), now_s
        if cost > self._steady + self.earned:
            return False
        from_steady = min(cost, self._steady)
        self._steady -= from_steady
        self.earned -= cost - from_steady
        return True

    def _steady_at(self, now_s: float) -> float:
        most = min(self._burst_bytes, self.bytes_per_hour)
        refill = max(now_s - self._filled_at_s, 0.0) * self.bytes_per_hour / 3600.0 if self.bytes_per_hour else 0.0
        return min(most, self._steady + refill)
