-------------------------------- MODULE gates --------------------------------
(* A group of consumers goes over changes of a topic's route (docs/routes.md). A change is one step here: inputs
   are sealed, outputs opened (routes.tla). Per partition there is one cursor; its owner is a member, or a rewind.
   A claim is carried out at the partition's leader; then each ancestor's leader is asked, and answers at any time;
   then the claim stands or is undone. A member that is fenced, or whose lease ends, acknowledges nothing any more.
   It may go on with what it was given, as at any takeover: no model says what programs do.
   With "Interval" a loss of power takes a partition's cursor back to what a majority has synced.
   Left out: several groups, reclaim's ages, retention, channels, broadcast, weak order.
   Rules; `Without` names those that are switched off:
     "claim"     a claim of an output is done first, then its ancestors are asked
     "acked"     an input is drained when its end is acknowledged, not when it is delivered
     "inputs"    all inputs are asked
     "ancestors" ... and all ancestors that are not reclaimed
     "final"     only a rewind moves a cursor off the end of a sealed partition
     "keep"      a claim that is undone leaves the cursor that it made
     "outputs"   a rewind takes outputs before inputs: not needed beside the next four
     "absent"    it takes those without a cursor, too
     "again"     ... and looks for new outputs when it has taken all
     "whole"     it sets the first cursor when it has taken all
     "held"      a cursor that a rewind holds is not drained
     "zero"      a cursor in a new output begins at 0
     "new"       an output is new to a group that has a cursor in any ancestor
     "oldest"    ... and looks for them in the oldest first
     "begin"     a group begins in outputs before inputs
     "follow"    a partition is reclaimed when its cursors have begun in its outputs
     "drained"   ... when no cursor in it is below its end
     "order"     ... and when its inputs are reclaimed
   and with "Interval":
     "drain"     an input is drained when a majority has synced that its end is acknowledged
     "take"      a rewind holds a cursor when a majority has synced that it does
     "pass"      a partition is reclaimed when majorities have synced the cursors in its outputs *)
EXTENDS Integers, Sequences, FiniteSets
CONSTANTS Shape, Begun, Interval, MaxEnd, MaxBack, MaxRewind, MaxBroken, MaxGone, MaxPower, Without
VARIABLES ver, end, gone,            \* the route's version; per partition its end; reclaimed partitions
          cur, own,                  \* per partition: the cursor, -1 if there is none; "-", "m" or "~" for a rewind
          granted, asked, refused, made, pos,   \* claims: that stand; answers; that made the cursor; delivered up to
          disk,                      \* per partition: cursor, owner and grant that a majority has synced
          rw, list, taken, put,      \* a rewind: its step, partitions, those taken, those set
          starts, looked, floor,     \* a group that begins: its partitions; where it saw no cursor; ghost: ends then
          acked,                     \* ghost: acknowledged up to, ever
          backs, rewinds, broken, powers
topic == <<ver, end, gone>>
claim == <<granted, asked, refused, made, pos>>
rewind == <<rw, list, taken, put>>
start == <<starts, looked, floor>>
counts == <<backs, rewinds, broken, powers, disk>>
vars == <<topic, cur, own, claim, rewind, start, acked, counts>>
On(rule) == rule \notin Without

Parents == CASE Shape = "move" -> <<{}, {1}>>
             [] Shape = "moves" -> <<{}, {1}, {2}>>
             [] Shape = "split" -> <<{}, {1}, {1}>>
             [] Shape = "merge" -> <<{}, {}, {1, 2}>>
Origin == CASE Shape = "move" -> <<0, 1>>
            [] Shape = "moves" -> <<0, 1, 2>>
            [] Shape = "split" -> <<0, 1, 1>>
            [] Shape = "merge" -> <<0, 0, 1>>
MaxVer == IF Shape = "moves" THEN 2 ELSE 1
P == 1..Len(Parents)
RECURSIVE Ancestors(_)
Ancestors(p) == Parents[p] \cup UNION {Ancestors(q) : q \in Parents[p]}
Outputs(p) == {q \in P : p \in Parents[q]}
Exists(p) == Origin[p] <= ver
There == {p \in P : Exists(p)} \ gone
Sealed(p) == \E q \in Outputs(p) : Exists(q)
Now(p) == [c |-> cur[p], o |-> own[p], g |-> p \in granted]
Durable(p) == ~Interval \/ (disk[p].c = cur[p] /\ disk[p].o = own[p])
Due(p) == IF ~On("inputs") THEN {q \in Parents[p] : \A x \in Parents[p] : q <= x}
          ELSE IF ~On("ancestors") THEN Parents[p] ELSE Ancestors(p)
Drained(q) == Sealed(q) /\ cur[q] >= 0 /\ (IF On("acked") THEN cur[q] ELSE pos[q]) = end[q]
                        /\ (On("held") => own[q] # "~") /\ (On("drain") => Durable(q))
Has(q) == q \notin gone /\ cur[q] >= 0
Known(p) == \E q \in (IF On("new") THEN Ancestors(p) ELSE Parents[p]) : Has(q)

Init == /\ ver = 0 /\ end = [p \in P |-> 0] /\ gone = {}
        /\ cur = [p \in P |-> IF Begun /\ Origin[p] = 0 THEN 0 ELSE -1] /\ own = [p \in P |-> "-"]
        /\ granted = {} /\ asked = [p \in P |-> {}] /\ refused = {} /\ made = {} /\ pos = [p \in P |-> 0]
        /\ rw = "idle" /\ list = {} /\ taken = {} /\ put = {}
        /\ starts = {} /\ looked = {} /\ floor = [p \in P |-> 0] /\ acked = [p \in P |-> 0]
        /\ backs = 0 /\ rewinds = 0 /\ broken = 0 /\ powers = 0
        /\ disk = [p \in P |-> Now(p)]

NoClaim(p, c, g) ==
  /\ granted' = (IF g THEN granted \cup {p} ELSE granted \ {p}) /\ refused' = refused \ {p} /\ made' = made \ {p}
  /\ asked' = [asked EXCEPT ![p] = IF On("claim") THEN {} ELSE @] /\ pos' = [pos EXCEPT ![p] = c]

(* What is on the disks. *)
Sync(p) == /\ Interval /\ disk[p] # Now(p) /\ disk' = [disk EXCEPT ![p] = Now(p)]
           /\ UNCHANGED <<topic, cur, own, claim, rewind, start, acked, backs, rewinds, broken, powers>>
Power(p) == /\ powers < MaxPower /\ powers' = powers + 1 /\ disk[p] # Now(p) /\ p \in There
            /\ cur' = [cur EXCEPT ![p] = disk[p].c] /\ own' = [own EXCEPT ![p] = disk[p].o]
            /\ NoClaim(p, IF disk[p].c < 0 THEN 0 ELSE disk[p].c, disk[p].g)
            /\ UNCHANGED <<topic, rewind, start, acked, backs, rewinds, broken, disk>>

(* The topic. *)
Add(p) == /\ Exists(p) /\ ~Sealed(p) /\ end[p] < MaxEnd /\ end' = [end EXCEPT ![p] = @ + 1]
             /\ UNCHANGED <<ver, gone, cur, own, claim, rewind, start, acked, counts>>
Change == /\ ver < MaxVer /\ ver' = ver + 1
          /\ UNCHANGED <<end, gone, cur, own, claim, rewind, start, acked, counts>>
Follow(p, q) == /\ p \in There /\ Sealed(p) /\ cur[p] = end[p] /\ cur[q] = -1
                /\ Cardinality(gone) < MaxGone
                /\ cur' = [cur EXCEPT ![q] = 0] /\ pos' = [pos EXCEPT ![q] = 0]
                /\ UNCHANGED <<topic, own, granted, asked, refused, made, rewind, start, acked, counts>>
Reclaim(p) == /\ p \in There /\ Sealed(p) /\ Cardinality(gone) < MaxGone
              /\ On("drained") => cur[p] \in {-1, end[p]}
              /\ On("order") => Parents[p] \subseteq gone
              /\ (On("follow") /\ cur[p] >= 0) => \A q \in Outputs(p) :
                    IF Interval /\ On("pass") THEN disk[q].c >= 0 ELSE cur[q] >= 0
              /\ gone' = gone \cup {p} /\ cur' = [cur EXCEPT ![p] = -1] /\ own' = [own EXCEPT ![p] = "-"]
              /\ granted' = granted \ {p} /\ refused' = refused \ {p} /\ made' = made \ {p}
              /\ asked' = [asked EXCEPT ![p] = {}] /\ pos' = [pos EXCEPT ![p] = 0]
              /\ UNCHANGED <<ver, end, rewind, start, acked, counts>>

(* Members. *)
Claim(p) == /\ p \in There /\ own[p] = "-" /\ (cur[p] >= 0 \/ Known(p))
            /\ On("claim") \/ Due(p) \ gone \subseteq asked[p]
            /\ LET c == IF cur[p] >= 0 THEN cur[p] ELSE IF On("zero") THEN 0 ELSE end[p]
               IN cur' = [cur EXCEPT ![p] = c] /\ pos' = [pos EXCEPT ![p] = c]
            /\ own' = [own EXCEPT ![p] = "m"] /\ asked' = [asked EXCEPT ![p] = {}]
            /\ made' = IF cur[p] = -1 THEN made \cup {p} ELSE made
            /\ granted' = IF On("claim") THEN granted ELSE granted \cup {p}
            /\ UNCHANGED <<topic, refused, rewind, start, acked, counts>>
Answer(p, q) == /\ p \in There /\ own[p] = (IF On("claim") THEN "m" ELSE "-") /\ p \notin granted
                /\ q \in Due(p) \ (gone \cup asked[p])
                /\ IF Drained(q) THEN asked' = [asked EXCEPT ![p] = @ \cup {q}] /\ UNCHANGED refused
                   ELSE refused' = (IF On("claim") THEN refused \cup {p} ELSE refused) /\ UNCHANGED asked
                /\ UNCHANGED <<topic, cur, own, granted, made, pos, rewind, start, acked, counts>>
Grant(p) == /\ own[p] = "m" /\ p \notin granted \cup refused /\ Due(p) \ gone \subseteq asked[p]
            /\ granted' = granted \cup {p} /\ made' = made \ {p}
            /\ disk' = IF disk[p].o = "m" THEN [disk EXCEPT ![p].g = TRUE] ELSE disk   \* it holds for that claim
            /\ UNCHANGED <<topic, cur, own, asked, refused, pos, rewind, start, acked>>
            /\ UNCHANGED <<backs, rewinds, broken, powers>>
Undo(p) == /\ own[p] = "m" /\ p \in refused
           /\ LET c == IF p \in made /\ ~On("keep") THEN -1 ELSE cur[p]
              IN cur' = [cur EXCEPT ![p] = c] /\ NoClaim(p, IF c < 0 THEN 0 ELSE c, FALSE)
           /\ own' = [own EXCEPT ![p] = "-"] /\ UNCHANGED <<topic, rewind, start, acked, counts>>
Free(p) == /\ own[p] = "m" /\ own' = [own EXCEPT ![p] = "-"] /\ NoClaim(p, cur[p], FALSE)
           /\ UNCHANGED <<topic, cur, rewind, start, acked, counts>>
Deliver(p) == /\ p \in granted /\ pos[p] < end[p] /\ pos' = [pos EXCEPT ![p] = @ + 1]
              /\ UNCHANGED <<topic, cur, own, granted, asked, refused, made, rewind, start, acked, counts>>
Ack(p) == /\ p \in granted /\ cur[p] < pos[p] /\ cur' = [cur EXCEPT ![p] = pos[p]]
          /\ acked' = [acked EXCEPT ![p] = IF pos[p] > @ THEN pos[p] ELSE @]
          /\ UNCHANGED <<topic, own, claim, rewind, start, counts>>
Back(p) == /\ p \in granted /\ cur[p] > 0 /\ backs < MaxBack /\ backs' = backs + 1
           /\ On("final") => ~(Sealed(p) /\ cur[p] = end[p])
           /\ cur' = [cur EXCEPT ![p] = 0] /\ pos' = [pos EXCEPT ![p] = 0]
           /\ UNCHANGED <<topic, own, granted, asked, refused, made, rewind, start, acked>>
           /\ UNCHANGED <<rewinds, broken, powers, disk>>

(* A rewind to the beginning. *)
List == /\ rw = "idle" /\ rewinds < MaxRewind /\ rewinds' = rewinds + 1
        /\ rw' = "take" /\ list' = There /\ taken' = {} /\ put' = {}
        /\ UNCHANGED <<topic, cur, own, claim, start, acked, backs, broken, powers, disk>>
TakeOver(p) == /\ rw = "take" /\ p \in list \ taken
               /\ On("outputs") => \A q \in list : p \in Ancestors(q) => q \in taken
               /\ taken' = IF p \in There /\ Interval /\ On("take") THEN taken ELSE taken \cup {p}
               /\ IF p \in gone \/ (cur[p] = -1 /\ ~On("absent")) THEN UNCHANGED <<cur, own, claim>>
                  ELSE LET c == IF cur[p] < 0 THEN 0 ELSE cur[p]
                       IN cur' = [cur EXCEPT ![p] = c] /\ own' = [own EXCEPT ![p] = "~"] /\ NoClaim(p, c, FALSE)
               /\ UNCHANGED <<topic, rw, list, put, start, acked, counts>>
Held(p) == /\ Interval /\ rw = "take" /\ p \in list \ taken /\ own[p] = "~" /\ Durable(p)
           /\ taken' = taken \cup {p}
           /\ UNCHANGED <<topic, cur, own, claim, rw, list, put, start, acked, counts>>
Again == /\ rw = "take" /\ taken = list
         /\ IF On("again") /\ ~(There \subseteq list) THEN list' = list \cup There /\ UNCHANGED rw
            ELSE rw' = "set" /\ UNCHANGED list
         /\ UNCHANGED <<topic, cur, own, claim, taken, put, start, acked, counts>>
Put(p) == /\ rw = "set" \/ (rw = "take" /\ ~On("whole"))
          /\ p \in taken \ put /\ put' = put \cup {p}
          /\ IF own[p] = "~" THEN cur' = [cur EXCEPT ![p] = 0] /\ pos' = [pos EXCEPT ![p] = 0]
             ELSE UNCHANGED <<cur, pos>>
          /\ UNCHANGED <<topic, own, granted, asked, refused, made, rw, list, taken, start, acked, counts>>
LetGo(p) == /\ rw = "set" /\ put = taken /\ own[p] = "~" /\ own' = [own EXCEPT ![p] = "-"]
            /\ UNCHANGED <<topic, cur, claim, rewind, start, acked, counts>>
Done == /\ rw = "set" /\ put = taken /\ (\A p \in P : own[p] # "~")
        /\ rw' = "idle" /\ list' = {} /\ taken' = {} /\ put' = {}
        /\ UNCHANGED <<topic, cur, own, claim, start, acked, counts>>
Break == /\ rw # "idle" /\ broken < MaxBroken /\ broken' = broken + 1
         /\ rw' = "idle" /\ list' = {} /\ taken' = {} /\ put' = {}
         /\ UNCHANGED <<topic, cur, own, claim, start, acked, backs, rewinds, powers, disk>>

(* A group that begins at the end, and one that finds no cursor: it takes itself for new. *)
Start == /\ ~Begun /\ starts = {} /\ starts' = There /\ floor' = [p \in P |-> IF p \in There THEN end[p] ELSE 0]
         /\ UNCHANGED <<topic, cur, own, claim, looked, rewind, acked, counts>>
Place(p) == /\ p \in starts /\ cur[p] = -1
            /\ On("begin") => \A q \in starts : p \in Ancestors(q) => cur[q] >= 0
            /\ cur' = [cur EXCEPT ![p] = end[p]] /\ pos' = [pos EXCEPT ![p] = end[p]]
            /\ acked' = [acked EXCEPT ![p] = end[p]]
            /\ UNCHANGED <<topic, own, granted, asked, refused, made, rewind, start, counts>>
Look(p) == /\ Begun /\ MaxGone > 0 /\ Exists(p) /\ cur[p] = -1 /\ p \notin looked
           /\ (On("oldest") /\ On("new")) => Ancestors(p) \subseteq looked
           /\ looked' = looked \cup {p}
           /\ UNCHANGED <<topic, cur, own, claim, starts, floor, rewind, acked, counts>>
Newcomer(p) == /\ p \in There /\ cur[p] = -1
               /\ (IF On("new") THEN Ancestors(p) ELSE Parents[p]) \cup {p} \subseteq looked
               /\ cur' = [cur EXCEPT ![p] = end[p]] /\ pos' = [pos EXCEPT ![p] = end[p]]
               /\ UNCHANGED <<topic, own, granted, asked, refused, made, rewind, start, acked, counts>>

Next == \/ Change \/ List \/ Again \/ Done \/ Break \/ Start
        \/ \E p \in P : \/ Add(p) \/ Reclaim(p) \/ Claim(p) \/ Grant(p) \/ Undo(p) \/ Free(p)
                        \/ Deliver(p) \/ Ack(p) \/ Back(p) \/ TakeOver(p) \/ Put(p) \/ LetGo(p)
                        \/ Place(p) \/ Look(p) \/ Newcomer(p) \/ Held(p) \/ Sync(p) \/ Power(p)
                        \/ \E q \in P : Answer(p, q)
                        \/ \E q \in Outputs(p) : Exists(q) /\ Follow(p, q)
Spec == Init /\ [][Next]_vars

(* A member owns a partition only while all that lies before it is acknowledged. *)
Gate == \A p \in granted : \A q \in Ancestors(p) \ gone : Sealed(q) /\ cur[q] = end[q]
(* No cursor passes a record that was not acknowledged, or lay before the group's beginning; none is reclaimed. *)
Skipped == \A p \in P : cur[p] <= acked[p] /\ (p \in gone => acked[p] = end[p])
(* A group that begins at the end gets nothing from before. *)
Begin == \A p \in P : cur[p] >= 0 => cur[p] >= floor[p]
=============================================================================
