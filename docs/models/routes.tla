------------------------------- MODULE routes -------------------------------
(* A topic's route changes (docs/routes.md): neighbouring inputs are sealed, and outputs over the same keys opened.
   A partition is one log with a commit index and the index up to which a majority has synced; without "Interval" the
   two are one. A new leader may cut what is not committed, a loss of power what is not synced, an accepted loss
   anything. Views of the catalog, however old, are actions that come late, as what they act on stays true.
   Messages, reports and commands may arrive at any time, any number of times, or never.
   Left out: what consumers do (gates.tla), elections and replicas (as in Raft), holds and other waiting, times of
   entries, epochs of producers, the reclaim of sealed partitions (gates.tla).
   Without "Strict" (order=weak) a change may be forced: outputs open though an input has no seal yet, producers go on
   there at once, and what has no answer stays with the input.
   Rules; `Without` names those that are switched off:
     "one"      a change begins when no other is under way
     "numbers"  the numbers of outputs are used once, those of a cancelled change too
     "cancel"   a change is cancelled only while it is being prepared
     "close"    an input is sealed only when the catalog says that the change is closing
     "pin"      ... and when nothing is prepared at the end of its log that is not published or released
     "last"     no record is appended behind a SEAL
     "commit"   a seal is reported when it is committed
     "sync"     ... and synced on a majority
     "all"      outputs open when the seals of all inputs are in the catalog
     "said"     a new batch is answered `sealed` when the SEAL is committed
     "durable"  ... and synced on a majority
     "retry"    a batch that the sealed log holds is answered with its receipt
     "resolve"  a producer sends to outputs when each batch that it sent to an input has a receipt or is `sealed`
     "lookup"   a request that is sent again is looked up in all sealed ancestors first
     "version"  records by number are refused from a producer whose route is older than the partition's opening
     "ask"      after an accepted loss a leader asks the catalog before it takes records
     "closing"  ... and seals if a change is closing over it, though its seal is not reported
     "until"    ... and each later leader too, until that seal is synced on a majority *)
EXTENDS Integers, Sequences, FiniteSets
CONSTANTS Shape, Load, Strict, Interval, MaxCut, MaxPower, MaxLoss, Without
VARIABLES log, com, syn, unsure,     \* per partition: entries; committed, synced up to; its log may be short
          phase, rep, hist,          \* catalog: of each change; inputs whose seals it has; changes that are done
          num, next,                 \* catalog: numbers of partitions; the next one
          closed, said,              \* in the air: changes that ever closed; reports
          msgs,                      \* in the air: batches
          at, pv,                    \* producers: where each batch is, and its answer; their route's version
          oks, lost,                 \* ghosts: batches with a receipt; what power and accepted losses took of them
          tx,                        \* the transaction: 0 undecided, p decided for p, -1 decided without it
          cuts, powers, losses
logs == <<log, com, syn, unsure>>
catalog == <<phase, rep, hist, num, next, closed>>
clients == <<msgs, at, pv, oks>>
faults == <<cuts, powers, losses, lost>>
vars == <<logs, catalog, said, clients, tx, faults>>
On(rule) == rule \notin Without

(* Which keys the partitions hold, and which changes may come. *)
Keys == CASE Shape = "move" -> <<{1}, {1}>>
          [] Shape = "split" -> <<{1, 2}, {1}, {2}>>
          [] Shape = "merge" -> <<{1}, {2}, {1, 2}>>
          [] Shape = "rivals" -> <<{1}, {1}, {1}>>           \* two changes of one partition
          [] Shape = "moves" -> <<{1}, {1}, {1}>>            \* one after the other
          [] Shape = "there and back" -> <<{1, 2}, {1}, {2}, {1, 2}>>
Change(i, o) == [ins |-> i, outs |-> o]
Changes == CASE Shape = "move" -> <<Change({1}, {2})>>
             [] Shape = "split" -> <<Change({1}, {2, 3})>>
             [] Shape = "merge" -> <<Change({1, 2}, {3})>>
             [] Shape = "rivals" -> <<Change({1}, {2}), Change({1}, {3})>>
             [] Shape = "moves" -> <<Change({1}, {2}), Change({2}, {3})>>
             [] Shape = "there and back" -> <<Change({1}, {2, 3}), Change({2, 3}, {4})>>
P == 1..Len(Keys)
C == 1..Len(Changes)
Born(p) == {c \in C : p \in Changes[c].outs}      \* one change, or none for a partition of the beginning
Roots == {p \in P : Born(p) = {}}
Parents(p) == UNION {Changes[c].ins : c \in Born(p)}
RECURSIVE Ancestors(_)
Ancestors(p) == Parents(p) \cup UNION {Ancestors(q) : q \in Parents(p)}
RECURSIVE Route(_)                                 \* of version v, or what it would be
Route(v) == IF v = 0 THEN Roots ELSE (Route(v - 1) \ Changes[hist[v]].ins) \cup Changes[hist[v]].outs
Current == Route(Len(hist))
Holder(k, v) == CHOOSE p \in Route(v) : k \in Keys[p]
Opening(p) == IF p \in Roots THEN 0 ELSE CHOOSE v \in 1..Len(hist) : p \in Changes[hist[v]].outs

(* Entries. Producers "a", "b" send batches of these keys, in this order. "k" is a client that sends one request again
   and again, "d" one that takes numbers for places. *)
E(who, key, n) == [who |-> who, key |-> key, n |-> n]
Seal(c) == E("SEAL", 0, c)
OPEN == E("OPEN", 0, 0)
PREPARE == E("PREPARE", 0, 0)
RELEASE == E("RELEASE", 0, 0)
PUBLISH == E("PUBLISH", 0, 0)
Producers == IF Load \in {"same", "both"} THEN {"a"} ELSE IF Load = "two" THEN {"a", "b"} ELSE {}
Sends(w) == IF w = "b" THEN <<1>> ELSE IF Load = "both" THEN <<1, 2>> ELSE IF Load = "two" THEN <<1>> ELSE <<1, 1>>
REQUEST == E("k", 1, 1)
Batches == UNION {{E(w, Sends(w)[n], n) : n \in 1..Len(Sends(w))} : w \in Producers}
             \cup (IF Load = "request" THEN {REQUEST} ELSE {})
Has(s, e) == \E i \in 1..Len(s) : s[i] = e
Sealed(s) == \E i \in 1..Len(s) : s[i].who = "SEAL"
Of(s, w) == Cardinality({i \in 1..Len(s) : s[i].who = w})
Committed(p) == SubSeq(log[p], 1, com[p])
Synced(p) == SubSeq(log[p], 1, syn[p])
Pinned(s) == Has(s, PREPARE) /\ ~Has(s, PUBLISH) /\ ~Has(s, RELEASE)
Opened(p) == p \in Roots \/ Has(log[p], OPEN)
Takes(p) == Opened(p) /\ ~Sealed(log[p]) /\ (On("ask") => ~unsure[p])
Low(a, b) == IF a < b THEN a ELSE b

Init == /\ log = [p \in P |-> <<>>] /\ com = [p \in P |-> 0] /\ syn = com /\ unsure = [p \in P |-> FALSE]
        /\ phase = [c \in C |-> "none"] /\ rep = {} /\ hist = <<>>
        /\ num = [p \in P |-> IF p \in Roots THEN p ELSE 0] /\ next = Cardinality(Roots) + 1
        /\ closed = {} /\ said = {} /\ msgs = {} /\ at = [w \in Producers |-> <<>>]
        /\ pv = [w \in Producers |-> 0] /\ oks = {} /\ lost = {} /\ tx = 0
        /\ cuts = 0 /\ powers = 0 /\ losses = 0

(* Logs. *)
Add(p, e) == /\ log' = [log EXCEPT ![p] = Append(@, e)]
             /\ UNCHANGED <<com, syn, catalog, said, clients, faults>>
Commit(p) == /\ com[p] < Len(log[p]) /\ com' = [com EXCEPT ![p] = Len(log[p])]
             /\ syn' = IF Interval THEN syn ELSE com'
             /\ UNCHANGED <<log, unsure, catalog, said, clients, tx, faults>>
Sync(p) == /\ syn[p] < com[p] /\ syn' = [syn EXCEPT ![p] = com[p]]
           /\ UNCHANGED <<log, com, unsure, catalog, said, clients, tx, faults>>
Shorten(p, n) == /\ log' = [log EXCEPT ![p] = SubSeq(@, 1, n)]
                 /\ com' = [com EXCEPT ![p] = Low(@, n)] /\ syn' = [syn EXCEPT ![p] = Low(@, n)]
                 /\ lost' = lost \cup {e \in oks : Has(log[p], e) /\ ~Has(SubSeq(log[p], 1, n), e)}
                 /\ UNCHANGED <<catalog, said, clients, tx>>
Cut(p) == /\ cuts < MaxCut /\ cuts' = cuts + 1
          /\ \E n \in com[p]..Len(log[p]) - 1 : Shorten(p, n) /\ UNCHANGED <<unsure, powers, losses>>
Power(p) == /\ powers < MaxPower /\ powers' = powers + 1
            /\ \E n \in syn[p]..Len(log[p]) - 1 : Shorten(p, n) /\ UNCHANGED <<unsure, cuts, losses>>
Loss(p) == /\ losses < MaxLoss /\ losses' = losses + 1 /\ unsure' = [unsure EXCEPT ![p] = TRUE]
           /\ \E n \in 0..Len(log[p]) - 1 : Shorten(p, n) /\ UNCHANGED <<cuts, powers>>

(* The catalog. *)
UnderWay == {c \in C : phase[c] \in {"preparing", "closing"}}
Taken == {num[p] : p \in {q \in P : num[q] > 0 /\ \A c \in Born(q) : phase[c] # "cancelled"}}
Begin(c) == /\ phase[c] = "none" /\ Changes[c].ins \subseteq Current
            /\ On("one") => UnderWay = {}
            /\ LET unused == CHOOSE n \in P : n \notin Taken /\ \A m \in 1..n - 1 : m \in Taken
                   free == IF On("numbers") THEN next ELSE unused
               IN num' = [p \in P |-> IF p \in Changes[c].outs
                                      THEN free + Cardinality({q \in Changes[c].outs : q < p}) ELSE num[p]]
            /\ next' = next + Cardinality(Changes[c].outs)
            /\ phase' = [phase EXCEPT ![c] = "preparing"]
            /\ UNCHANGED <<logs, rep, hist, closed, said, clients, tx, faults>>
Close(c) == /\ phase[c] = "preparing" /\ phase' = [phase EXCEPT ![c] = "closing"] /\ closed' = closed \cup {c}
            /\ UNCHANGED <<logs, rep, hist, num, next, said, clients, tx, faults>>
Cancel(c) == /\ phase[c] = "preparing" \/ (~On("cancel") /\ phase[c] = "closing")
             /\ phase' = [phase EXCEPT ![c] = "cancelled"]
             /\ UNCHANGED <<logs, rep, hist, num, next, closed, said, clients, tx, faults>>
Note(c, p) == /\ <<c, p>> \in said /\ phase[c] = "closing" /\ <<c, p>> \notin rep
              /\ rep' = rep \cup {<<c, p>>}
              /\ IF ~On("all") \/ \A q \in Changes[c].ins : <<c, q>> \in rep'
                 THEN phase' = [phase EXCEPT ![c] = "done"] /\ hist' = Append(hist, c)
                 ELSE UNCHANGED <<phase, hist>>
              /\ UNCHANGED <<logs, num, next, closed, said, clients, tx, faults>>
Force(c) == /\ ~Strict /\ phase[c] = "closing"
            /\ phase' = [phase EXCEPT ![c] = "done"] /\ hist' = Append(hist, c)
            /\ UNCHANGED <<logs, rep, num, next, closed, said, clients, tx, faults>>

(* Leaders of inputs and outputs. *)
PutSeal(c, p) == /\ c \in closed \/ (~On("close") /\ phase[c] = "preparing")
                 /\ p \in Changes[c].ins /\ Opened(p) /\ ~Sealed(log[p])
                 /\ On("pin") => ~Pinned(log[p])
                 /\ Add(p, Seal(c)) /\ UNCHANGED <<unsure, tx>>
Report(c, p) == /\ p \in Changes[c].ins /\ <<c, p>> \notin said
                /\ Has(IF ~On("commit") THEN log[p] ELSE IF ~On("sync") THEN Committed(p) ELSE Synced(p), Seal(c))
                /\ said' = said \cup {<<c, p>>}
                /\ UNCHANGED <<logs, catalog, clients, tx, faults>>
Open(p) == /\ \E c \in Born(p) : phase[c] = "done"
           /\ ~Has(log[p], OPEN) /\ Add(p, OPEN) /\ UNCHANGED <<unsure, tx>>
Ask(p) == /\ unsure[p]
          /\ LET over == {c \in C : /\ p \in Changes[c].ins
                                    /\ IF On("closing") THEN phase[c] \in {"closing", "done"} ELSE <<c, p>> \in rep}
             IN IF over # {} /\ ~Sealed(log[p])
                THEN \E c \in over : Add(p, Seal(c)) /\ unsure' = [unsure EXCEPT ![p] = On("until")]
                ELSE /\ over = {} \/ Sealed(Synced(p)) \/ ~On("until")
                     /\ unsure' = [unsure EXCEPT ![p] = FALSE]
                     /\ UNCHANGED <<log, com, syn, catalog, said, clients, faults>>
          /\ UNCHANGED tx
Take(m) == /\ Takes(m.p) \/ (~On("last") /\ Opened(m.p))
           /\ On("version") => m.v >= Opening(m.p)
           /\ Of(log[m.p], m.e.who) + 1 = m.s
           /\ Add(m.p, m.e) /\ UNCHANGED <<unsure, tx>>

(* Producers. A lane is a partition's batches, with sequences from 1. *)
Lane(w, p) == {i \in 1..Len(at[w]) : at[w][i].p = p}
Message(p, e, s, v) == [p |-> p, e |-> e, s |-> s, v |-> v]
Send(w) == /\ Len(at[w]) < Len(Sends(w))
           /\ LET n == Len(at[w]) + 1
                  e == E(w, Sends(w)[n], n)
                  p == Holder(e.key, pv[w])
                  s == Cardinality(Lane(w, p)) + 1
              IN /\ \A i \in Lane(w, p) : at[w][i].a # "sealed"
                 /\ at' = [at EXCEPT ![w] = Append(@, [p |-> p, s |-> s, a |-> "?",
                                                       after |-> {o \in oks : o.key = e.key}])]
                 /\ msgs' = msgs \cup {Message(p, e, s, pv[w])}
           /\ UNCHANGED <<logs, catalog, said, pv, oks, tx, faults>>
Batch(w, i) == E(w, Sends(w)[i], i)
Receipt(w, i) == /\ at[w][i].a = "?" /\ Has(Committed(at[w][i].p), Batch(w, i))
                 /\ at' = [at EXCEPT ![w][i].a = "ok"] /\ oks' = oks \cup {Batch(w, i)}
                 /\ UNCHANGED <<logs, catalog, said, msgs, pv, tx, faults>>
Refused(w, i) ==
  LET p == at[w][i].p IN
  /\ at[w][i].a = "?"
  /\ Sealed(IF ~On("said") THEN log[p] ELSE IF ~On("durable") THEN Committed(p) ELSE Synced(p))
  /\ On("retry") => ~Has(log[p], Batch(w, i))
  /\ at' = [at EXCEPT ![w][i].a = "sealed"]
  /\ UNCHANGED <<logs, catalog, said, msgs, pv, oks, tx, faults>>
Switch(w) ==
  /\ pv[w] < Len(hist)
  /\ LET v == pv[w] + 1
         mine == {i \in 1..Len(at[w]) : at[w][i].p \in Changes[hist[v]].ins}
         moved == IF Strict THEN {i \in mine : at[w][i].a # "ok"} ELSE {}
         to(i) == Holder(Sends(w)[i], v)
         rank(i) == Cardinality({j \in moved : j <= i /\ to(j) = to(i)})
     IN /\ Strict /\ On("resolve") => \A i \in mine : at[w][i].a # "?"
        /\ at' = [at EXCEPT ![w] = [i \in 1..Len(@) |->
                    IF i \in moved THEN [@[i] EXCEPT !.p = to(i), !.s = rank(i), !.a = "?"] ELSE @[i]]]
        /\ msgs' = msgs \cup {Message(to(i), Batch(w, i), rank(i), v) : i \in moved}
        /\ pv' = [pv EXCEPT ![w] = v]
  /\ UNCHANGED <<logs, catalog, said, oks, tx, faults>>
Move(w, i) ==                                      \* weak order: one by one, as they are answered
  /\ ~Strict /\ at[w][i].p \notin Route(pv[w])
  /\ at[w][i].a = "sealed" \/ (~On("resolve") /\ at[w][i].a = "?")
  /\ LET p == Holder(Sends(w)[i], pv[w])
         s == Cardinality(Lane(w, p)) + 1
     IN /\ at' = [at EXCEPT ![w][i].p = p, ![w][i].s = s, ![w][i].a = "?"]
        /\ msgs' = msgs \cup {Message(p, Batch(w, i), s, pv[w])}
  /\ UNCHANGED <<logs, catalog, said, pv, oks, tx, faults>>
(* A request to the topic, cut by a node whose route may be old. *)
Request(v) == /\ Load = "request"
              /\ LET p == Holder(1, v) IN
                 /\ On("lookup") => \A q \in Ancestors(p) : Sealed(Committed(q)) /\ ~Has(Committed(q), REQUEST)
                 /\ msgs' = msgs \cup {Message(p, REQUEST, 1, v)}
              /\ UNCHANGED <<logs, catalog, said, at, pv, oks, tx, faults>>
(* A producer who knows route 0 only, and sends key 1 to the partition that it computes from their number. *)
Dense(p) == /\ Load = "dense" /\ p \notin Roots
            /\ msgs' = msgs \cup {Message(p, E("d", 1, 1), 1, 0)}
            /\ UNCHANGED <<logs, catalog, said, at, pv, oks, tx, faults>>

(* One transaction: records that are staged, prepared, and published when its coordinator has decided. *)
Prepare(p) == /\ Load = "transaction" /\ tx = 0 /\ Takes(p) /\ 1 \in Keys[p]
              /\ \A q \in P : ~Has(log[q], PREPARE)
              /\ Add(p, PREPARE) /\ UNCHANGED <<unsure, tx>>
Decide(p) == /\ tx = 0 /\ Has(Committed(p), PREPARE) /\ tx' = p
             /\ UNCHANGED <<logs, catalog, said, clients, faults>>
Drop == /\ Load = "transaction" /\ tx = 0 /\ tx' = -1 /\ UNCHANGED <<logs, catalog, said, clients, faults>>
Publish(p) == /\ tx = p /\ Pinned(log[p]) /\ ~Sealed(log[p]) /\ Add(p, PUBLISH) /\ UNCHANGED <<unsure, tx>>
Release(p) == /\ tx = -1 /\ Pinned(log[p]) /\ Add(p, RELEASE) /\ UNCHANGED <<unsure, tx>>

Next == \/ \E p \in P : \/ Commit(p) \/ Sync(p) \/ Cut(p) \/ Power(p) \/ Loss(p)
                        \/ Open(p) \/ Ask(p) \/ Dense(p) \/ Prepare(p) \/ Decide(p) \/ Publish(p) \/ Release(p)
        \/ \E c \in C : \/ Begin(c) \/ Close(c) \/ Cancel(c) \/ Force(c)
                        \/ \E p \in Changes[c].ins : PutSeal(c, p) \/ Report(c, p) \/ Note(c, p)
        \/ \E m \in msgs : Take(m)
        \/ \E w \in Producers : \/ Send(w) \/ Switch(w)
                                \/ \E i \in 1..Len(at[w]) : Receipt(w, i) \/ Refused(w, i) \/ Move(w, i)
        \/ \E v \in 0..Len(hist) : Request(v)
        \/ Drop
Spec == Init /\ [][Next]_vars

(* One partition at most takes the records of a key. *)
One == \A p, q \in P : Takes(p) /\ Takes(q) /\ Keys[p] \cap Keys[q] # {} => p = q
(* Nothing lies behind a SEAL, and only inputs of a change that is not cancelled have one. *)
Last == \A p \in P : \A i \in 1..Len(log[p]) : log[p][i].who = "SEAL" => i = Len(log[p])
Stray == \A p \in P : \A i \in 1..Len(log[p]) :
           log[p][i].who = "SEAL" => phase[log[p][i].n] \in {"closing", "done"}
(* A change that is closing can end: no input is sealed by another one. *)
Ends == \A c \in C : phase[c] = "closing" =>
          \A p \in Changes[c].ins : \A i \in 1..Len(log[p]) : log[p][i].who = "SEAL" => log[p][i].n = c
(* A partition is open when all seals of its inputs are on the disks of majorities, and in the catalog. *)
Ready == \A p \in P \ Roots : Has(log[p], OPEN) =>
           \A c \in Born(p) : /\ phase[c] = "done"
                              /\ \A q \in Changes[c].ins : Has(Synced(q), Seal(c)) /\ <<c, q>> \in rep
Numbers == \A p, q \in P : num[p] > 0 /\ num[p] = num[q] => p = q
(* A batch is once in the logs; with a receipt it is there, unless its own log lost it. *)
Places(e) == {<<p, i>> \in P \X (1..6) : i <= Len(log[p]) /\ log[p][i] = e}
Once == \A e \in Batches : Cardinality(Places(e)) <= 1
There == \A e \in oks \ lost : Places(e) # {}
(* What was sent after another batch of the key had a receipt, or later by one producer, lies behind it. *)
Before(x, y) == \A a \in Places(x) : \A b \in Places(y) : (a[1] = b[1] /\ a[2] < b[2]) \/ a[1] \in Ancestors(b[1])
Ordered == \A w \in Producers : \A i \in 1..Len(at[w]) :
             /\ \A x \in at[w][i].after \ lost : Before(x, Batch(w, i))
             /\ \A j \in 1..i - 1 : Sends(w)[j] = Sends(w)[i] /\ Batch(w, j) \notin lost =>
                                     Before(Batch(w, j), Batch(w, i))
(* Records lie where their keys belong. *)
Placed == \A p \in P : \A i \in 1..Len(log[p]) : log[p][i].key # 0 => log[p][i].key \in Keys[p]
(* What is decided is published, or can be. *)
Kept == tx \in P => Has(log[tx], PREPARE) /\ (Sealed(log[tx]) => Has(log[tx], PUBLISH))
=============================================================================
