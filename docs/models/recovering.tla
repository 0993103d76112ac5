----------------------------- MODULE recovering -----------------------------
(* Raft with replicas that may have forgotten, and with changes of the configuration
   (docs/consensus.md#recovering). A recovering replica is called marked here.
   One log. Replicas are Voters0 and Learners. An entry is [t |-> term, v |-> {}], or carries the voters that are
   in force from its place in a log, committed or not. (index, term) names an entry.
   Messages may be received for ever: so loss, delay, doubling and reordering need no steps of their own.
     appends   tlog[t]: the log of term t's leader; any prefix of it may arrive at any replica whose term is not
               above t, also after the leader is gone
     answers   ack: <<term, replica, incarnation, index>>, the highest of each
     grants    <<term, candidate, replica, marked>>
     goals     gm: <<term, replica, incarnation, index>>: the leader knows this incarnation; up to there it must
               hold the leader's log before it is no longer marked
   Policy "interval": acknowledged when written; PowerLoss drops an unsynced suffix, raises the incarnation, sets
   the mark. A configuration is synced before anything follows it. Policy "commit": acknowledged when durable;
   PowerLoss is harmless and unmarked; Damage drops any suffix and sets the mark.
   HsLoss: a folder that goes back loses the term and the vote as well. Its replica comes back in a later term than
   any it has seen, where it has not voted (mutant "oldterm": in an older one).
   A release: a process asks every recorded replica twice. First for its incarnation (one instant stands for all
   answers, as the second answer must name the same one), then for the end of its log, which a leader does
   not answer. Each marked replica, in that incarnation, may then grant as one without a mark to candidates whose
   log is at least as late as the latest end: its floor. A replica whose own log reaches it may campaign, a learner too. *)
EXTENDS Integers, Sequences, FiniteSets, TLC
CONSTANTS Voters0, Learners, None, MaxTerm, MaxLen, MaxFaults, MaxChanges, MaxAsks, Policy, HsLoss, Settled, Mut
VARIABLES term, voted, role, log, dur, rec, inc, faults,  \* replicas
          floor, ask, ans, asks,                          \* release
          grants, tlog, ldr, tcom, ack, gm,               \* messages
          cmt, bad, lost                                  \* ghosts
released == <<floor, ask, ans, asks>>
vars == <<term, voted, role, log, dur, rec, inc, faults, released, grants, tlog, ldr, tcom, ack, gm, cmt, bad, lost>>

R == Voters0 \cup Learners
Terms == 1..MaxTerm
F == (Cardinality(Voters0) - 1) \div 2
Sym == Permutations(Voters0)
Min(a, b) == IF a < b THEN a ELSE b
Max(a, b) == IF a > b THEN a ELSE b
MajOf(V, S) == 2 * Cardinality(V \cap S) > Cardinality(V)
Pre(l, n) == SubSeq(l, 1, n)
Entry(t) == [t |-> t, v |-> {}]
LastOf(l) == IF l = <<>> THEN 0 ELSE l[Len(l)].t
Place(l) == <<LastOf(l), Len(l)>>
AtLeast(p, q) == p[1] > q[1] \/ (p[1] = q[1] /\ p[2] >= q[2])
UpToDate(c, v) == AtLeast(Place(log[c]), Place(log[v]))
Has(l, k, e) == Len(l) >= k /\ l[k] = e
RECURSIVE Common(_, _, _)
Common(l, m, k) == IF k = 0 THEN 0 ELSE
                   IF k <= Len(l) /\ Pre(l, k) = Pre(m, k) THEN k ELSE Common(l, m, k - 1)
First(t) == CHOOSE k \in 1..Len(tlog[t]) : tlog[t][k].t = t /\ \A n \in 1..(k-1) : tlog[t][n].t # t
Known(t, j) == LET S == {x \in gm : x[1] = t /\ x[2] = j} IN
               IF S = {} THEN 0 ELSE CHOOSE n \in {x[3] : x \in S} : \A x \in S : x[3] <= n
Marked == {r \in R : rec[r]}
(* Configurations *)
Changes(l) == {k \in 1..Len(l) : l[k].v # {}}
LastChange(l) == IF Changes(l) = {} THEN 0 ELSE CHOOSE k \in Changes(l) : \A n \in Changes(l) : n <= k
Conf(l) == IF LastChange(l) = 0 THEN Voters0 ELSE l[LastChange(l)].v
MayVote(i) == i \in Voters0 \/ \E k \in Changes(log[i]) : i \in log[i][k].v
Synced(l) == LET S == {k \in Changes(l) : k < Len(l)} IN     \* at least so far is durable
             IF S = {} THEN 0 ELSE CHOOSE k \in S : \A n \in S : n <= k
(* Who the catalog has on record: all but those whose removal is committed. *)
Recorded == LET C == {k \in 1..Len(cmt) : cmt[k][1].v # {}}
                k == CHOOSE k \in C : \A n \in C : n <= k
            IN IF C = {} THEN R ELSE cmt[k][1].v \cup Learners
Asked == IF "votersonly" \in Mut THEN Recorded \ Learners ELSE Recorded
Released(v, p) == floor[v] # None /\ ("nofloor" \in Mut \/ AtLeast(p, floor[v]))
CountsMarked(v, c) == rec[v] /\ ~Released(v, Place(log[c]))

Init == \E l \in Voters0 :
  LET l0 == <<Entry(1)>> IN
  /\ term = [r \in R |-> 1] /\ voted = [r \in R |-> l]
  /\ role = [r \in R |-> IF r = l THEN "L" ELSE "F"]
  /\ log = [r \in R |-> IF r = l \/ Settled THEN l0 ELSE <<>>]
  /\ dur = [r \in R |-> IF Settled THEN 1 ELSE 0]
  /\ rec = [r \in R |-> FALSE] /\ inc = [r \in R |-> 0] /\ faults = 0
  /\ floor = [r \in R |-> None] /\ ask = None /\ ans = [r \in R |-> None] /\ asks = 0
  /\ grants = {} /\ gm = {}
  /\ ack = IF Settled THEN {<<1, r, 0, 1>> : r \in R \ {l}} ELSE {}
  /\ tlog = [t \in Terms |-> IF t = 1 THEN l0 ELSE <<>>]
  /\ ldr = [t \in Terms |-> IF t = 1 THEN l ELSE None]
  /\ tcom = [t \in Terms |-> IF t = 1 /\ Settled THEN 1 ELSE 0]
  /\ cmt = (IF Settled THEN <<<<Entry(1), 1>>>> ELSE <<>>) /\ bad = "" /\ lost = FALSE

(* What can no longer have an effect is forgotten (fewer states, same behaviours). *)
Msgs(g, tl, ld, tc, a, m) ==
  LET back == HsLoss /\ "oldterm" \in Mut
      Live(t) == back \/ \E r \in R : term'[r] <= t
      Led(t) == \E r \in R : role'[r] = "L" /\ term'[r] = t
  IN /\ tlog' = [t \in Terms |-> IF Live(t) THEN tl[t] ELSE <<>>]
     /\ ldr'  = [t \in Terms |-> IF Live(t) THEN ld[t] ELSE None]
     /\ tcom' = [t \in Terms |-> IF Live(t) THEN tc[t] ELSE 0]
     /\ ack'  = {x \in a : Led(x[1])}
     /\ gm'   = {x \in m : Led(x[1]) \/ (rec'[x[2]] /\ x[3] = inc'[x[2]] /\ term'[x[2]] <= x[1])}
     /\ grants' = {x \in g : back \/ (role'[x[2]] = "C" /\ term'[x[2]] = x[1])}
Same == Msgs(grants, tlog, ldr, tcom, ack, gm)

Timeout(i) ==
  /\ role[i] # "L" /\ term[i] < MaxTerm
  /\ MayVote(i) \/ Released(i, Place(log[i]))
  /\ term' = [term EXCEPT ![i] = @ + 1] /\ voted' = [voted EXCEPT ![i] = i]
  /\ role' = [role EXCEPT ![i] = "C"]
  /\ UNCHANGED <<log, dur, rec, inc, faults, released, cmt, bad, lost>>
  /\ Msgs(grants \cup {<<term[i] + 1, i, i, CountsMarked(i, i)>>}, tlog, ldr, tcom, ack, gm)

Grant(c, v) ==
  /\ c # v /\ role[c] = "C" /\ v \in Conf(log[c]) /\ UpToDate(c, v)
  /\ \/ term[v] < term[c]
     \/ term[v] = term[c] /\ voted[v] = None /\ role[v] = "F"
  /\ term' = [term EXCEPT ![v] = term[c]] /\ voted' = [voted EXCEPT ![v] = c]
  /\ role' = [role EXCEPT ![v] = "F"]
  /\ UNCHANGED <<log, dur, rec, inc, faults, released, cmt, bad, lost>>
  /\ Msgs(grants \cup {<<term[c], c, v, CountsMarked(v, c)>>}, tlog, ldr, tcom, ack, gm)

Win(i, t) ==
  LET V   == Conf(log[i])
      all == {x[3] : x \in {y \in grants : y[1] = t /\ y[2] = i}}
      un  == {x[3] : x \in {y \in grants : y[1] = t /\ y[2] = i /\ (~y[4] \/ "recvotes" \in Mut)}}
  IN \/ MajOf(V, un)
     \/ "everyvoter" \in Mut /\ V \subseteq all      \* mutant: the rule as it was
     \/ "ownfree" \in Mut /\ MajOf(V, un \cup {i})   \* mutant: its own grant always unmarked

(* Where a log makes r a voter, the last time; 0: it was one at first. What r acknowledged as a learner counts not. *)
Made(l, r) == LET S == {k \in Changes(l) : r \in l[k].v /\ r \notin Conf(Pre(l, k - 1))} IN
              IF S = {} THEN 0 ELSE CHOOSE k \in S : \A n \in S : n <= k

Durable(l, d) == IF Policy = "interval" THEN Max(d, Synced(l)) ELSE d

BecomeLeader(i) ==
  LET t == term[i]  nl == Append(log[i], Entry(t)) IN
  /\ role[i] = "C" /\ Len(log[i]) < MaxLen /\ Win(i, t)
  /\ role' = [role EXCEPT ![i] = "L"] /\ log' = [log EXCEPT ![i] = nl]
  /\ dur' = [dur EXCEPT ![i] = Durable(nl, @)]
  /\ bad' = IF ldr[t] # None THEN "leader"
            ELSE IF ~lost /\ \E k \in 1..Len(cmt) : cmt[k][2] < t /\ ~Has(nl, k, cmt[k][1])
            THEN "data" ELSE bad
  /\ UNCHANGED <<term, voted, rec, inc, faults, released, cmt, lost>>
  /\ Msgs(grants, [tlog EXCEPT ![t] = nl], [ldr EXCEPT ![t] = i], tcom, ack, gm)

Propose(i, e) ==
  /\ role[i] = "L" /\ Len(log[i]) < MaxLen
  /\ log' = [log EXCEPT ![i] = Append(@, e)]
  /\ dur' = [dur EXCEPT ![i] = Durable(log'[i], @)]
  /\ UNCHANGED <<term, voted, role, rec, inc, faults, released, cmt, bad, lost>>
  /\ Msgs(grants, [tlog EXCEPT ![term[i]] = log'[i]], ldr, tcom, ack, gm)
Client(i) == ~("noclient" \in Mut) /\ Propose(i, Entry(term[i]))
Change(i) ==
  LET t == term[i]  V == Conf(log[i]) IN
  /\ role[i] = "L" /\ Cardinality(Changes(log[i])) < MaxChanges
  /\ tcom[t] >= First(t) /\ LastChange(log[i]) <= tcom[t]
  /\ \/ \E r \in V : V # {r} /\ Propose(i, [t |-> t, v |-> V \ {r}])
     \/ \E r \in Learners \ V : Propose(i, [t |-> t, v |-> V \cup {r}])

(* Conflict-only truncation. An acknowledgement of what is written, or durable. *)
Receive(j, t) ==
  /\ tlog[t] # <<>> /\ ldr[t] # j /\ term[j] <= t /\ ~(role[j] = "L" /\ term[j] = t)
  /\ \E m \in 1..Len(tlog[t]) :
     LET l == log[j]  tl == tlog[t]  c == Common(l, tl, m)
         nl == IF c = m THEN l ELSE Pre(tl, m)
         nd == Durable(nl, Min(dur[j], IF c = m THEN Len(l) ELSE c))
         am == IF Policy = "interval" THEN m ELSE Min(m, nd)
         fc == Min(tcom[t], IF "lastindex" \in Mut THEN Len(nl) ELSE m)
         prev == {x \in ack : x[1] = t /\ x[2] = j /\ x[3] = inc[j]}
     IN /\ log' = [log EXCEPT ![j] = nl] /\ dur' = [dur EXCEPT ![j] = nd]
        /\ term' = [term EXCEPT ![j] = t] /\ role' = [role EXCEPT ![j] = "F"]
        /\ voted' = [voted EXCEPT ![j] = IF term[j] = t THEN @ ELSE None]
        /\ bad' = IF ~lost /\ \E k \in 1..fc : k > Len(cmt) \/ nl[k] # cmt[k][1] THEN "data" ELSE bad
        /\ UNCHANGED <<rec, inc, faults, released, cmt, lost>>
        /\ Msgs(grants, tlog, ldr, tcom,
                IF am = 0 \/ \E x \in prev : x[4] >= am THEN ack
                ELSE (ack \ prev) \cup {<<t, j, inc[j], am>>}, gm)

Commit(i) ==
  LET t == term[i]
      By(n) == {j \in R \ {i} : \E x \in ack : /\ x[1] = t /\ x[2] = j /\ x[4] >= Max(n, Made(log[i], j))
                                               /\ (x[3] = Known(t, j) \/ "matchkept" \in Mut)}
               \cup (IF Policy = "interval" \/ dur[i] >= n THEN {i} ELSE {})
  IN /\ role[i] = "L"
     /\ \E n \in (tcom[t] + 1)..Len(log[i]) :
        /\ log[i][n].t = t /\ MajOf(Conf(log[i]), By(n))
        /\ bad' = IF ~lost /\ \E k \in 1..Min(n, Len(cmt)) : cmt[k][1] # log[i][k] THEN "data" ELSE bad
        /\ cmt' = [k \in 1..Max(n, Len(cmt)) |-> IF k <= Len(cmt) THEN cmt[k] ELSE <<log[i][k], t>>]
        /\ lost' = (lost \/ \E k \in 1..Len(cmt') : \A r \in Recorded' : ~Has(log[r], k, cmt'[k][1]))
        /\ UNCHANGED <<term, voted, role, log, dur, rec, inc, faults, released>>
        /\ Msgs(grants, tlog, ldr, [tcom EXCEPT ![t] = n], ack, gm)

(* The leader hears of a higher incarnation: older answers count no more, the goal is fixed. *)
Meet(i, j) ==
  LET t == term[i] IN
  /\ role[i] = "L" /\ i # j
  /\ \E k \in (Known(t, j) + 1)..inc[j] :
     /\ UNCHANGED <<term, voted, role, log, dur, rec, inc, faults, released, cmt, bad, lost>>
     /\ Msgs(grants, tlog, ldr, tcom, ack, gm \cup {<<t, j, k,
             IF "nofirst" \in Mut THEN tcom[t] ELSE IF "nocommitidx" \in Mut THEN First(t)
             ELSE Max(tcom[t], First(t))>>})

Heal(j) ==
  LET t == term[j] IN
  /\ rec[j]
  /\ \/ \E x \in gm : LET g == x[4] IN
          /\ x[1] = t /\ x[2] = j /\ role[j] = "F"
          /\ x[3] = inc[j] \/ "anyinc" \in Mut
          /\ Len(log[j]) >= g
          /\ "lengthonly" \in Mut \/ Pre(log[j], g) = Pre(tlog[t], g)
          /\ "nodur" \in Mut \/ dur[j] >= g
          /\ "nocommitted" \in Mut \/ "nofirst" \in Mut \/ tcom[t] >= First(t)
     \/ role[j] = "L" /\ tcom[t] >= First(t) /\ ("nodur" \in Mut \/ dur[j] >= First(t))
     \/ "atonce" \in Mut
  /\ rec' = [rec EXCEPT ![j] = FALSE] /\ floor' = [floor EXCEPT ![j] = None]
  /\ UNCHANGED <<term, voted, role, log, dur, inc, faults, ask, ans, asks, cmt, bad, lost>>
  /\ Same

(* Unmarked interval replicas need no Sync step: not syncing is always the worse case. *)
Sync(i) ==
  /\ ~("nosync" \in Mut) /\ dur[i] < Len(log[i]) /\ (Policy = "commit" \/ rec[i])
  /\ dur' = [dur EXCEPT ![i] = Len(log[i])]
  /\ UNCHANGED <<term, voted, role, log, rec, inc, faults, released, cmt, bad, lost>>
  /\ Same

Restart(i) ==   \* kill -9: only what is in memory goes. Also: a leader that steps down.
  /\ role[i] # "F"
  /\ role' = [role EXCEPT ![i] = "F"]
  /\ UNCHANGED <<term, voted, log, dur, rec, inc, faults, released, cmt, bad, lost>>
  /\ Same

StepUp(i) ==
  /\ role[i] # "F"
  /\ \E k \in R : /\ term[k] > term[i]
                  /\ term' = [term EXCEPT ![i] = term[k]]
  /\ role' = [role EXCEPT ![i] = "F"] /\ voted' = [voted EXCEPT ![i] = None]
  /\ UNCHANGED <<log, dur, rec, inc, faults, released, cmt, bad, lost>>
  /\ Same

(* A round of asking that a fault interrupts comes to nothing, and may be begun again. *)
Forget(i, left) ==
  /\ log' = [log EXCEPT ![i] = left] /\ dur' = [dur EXCEPT ![i] = Len(left)]
  /\ role' = [role EXCEPT ![i] = "F"]
  /\ lost' = (lost \/ \E k \in 1..Len(cmt) : \A r \in Recorded : ~Has(log'[r], k, cmt[k][1]))
  /\ UNCHANGED cmt
Raise(i) ==
  /\ rec' = [rec EXCEPT ![i] = TRUE] /\ inc' = [inc EXCEPT ![i] = @ + 1]
  /\ floor' = [floor EXCEPT ![i] = None]
  /\ IF ask = None \/ "oneround" \in Mut THEN UNCHANGED <<ask, ans, asks>>
     ELSE ask' = None /\ ans' = [r \in R |-> None] /\ asks' = asks - 1
Promised == bad' = IF lost' /\ ~lost /\ Cardinality({r \in R : rec'[r]}) <= F THEN "promise" ELSE bad

Cut(i, left, mark) ==
  /\ faults < MaxFaults /\ faults' = faults + 1
  /\ Forget(i, left)
  /\ IF mark THEN Raise(i) ELSE UNCHANGED <<rec, inc, released>>
  /\ Promised
PowerLoss(i) ==
  /\ \E keep \in dur[i]..Len(log[i]) : Cut(i, Pre(log[i], keep), Policy = "interval")
  /\ UNCHANGED <<term, voted>> /\ Same
Damage(i) ==
  /\ Policy = "commit"
  /\ \E keep \in 0..Len(log[i]) : Cut(i, Pre(log[i], keep), TRUE)
  /\ IF ~HsLoss THEN UNCHANGED <<term, voted>>
     ELSE /\ voted' = [voted EXCEPT ![i] = None]
          /\ \E t \in IF "oldterm" \in Mut THEN {term[i], term[i] - 1} \ {0} ELSE {t \in Terms : t > term[i]} :
               term' = [term EXCEPT ![i] = t]
  /\ Same
(* A learner that was never a voter, as far as it knows, begins again with an empty log: a marked one, and with the
   policy "interval" any that is restarted (here: once). *)
BeginAnew(i) ==
  /\ rec[i] \/ (Policy = "interval" /\ inc[i] = 0)
  /\ ~MayVote(i) /\ log[i] # <<>>
  /\ Forget(i, <<>>) /\ Raise(i) /\ Promised
  /\ UNCHANGED <<term, voted, faults>> /\ Same

AskAll ==
  /\ ask = None /\ asks < MaxAsks /\ Marked # {}
  /\ ask' = inc /\ ans' = [r \in R |-> None] /\ asks' = asks + 1
  /\ UNCHANGED <<term, voted, role, log, dur, rec, inc, faults, floor, cmt, bad, lost>> /\ Same
Answer(r) ==
  /\ ask # None /\ r \in Asked /\ ans[r] = None
  /\ ask[r] = inc[r] \/ "oneround" \in Mut
  /\ role[r] # "L" \/ "leading" \in Mut
  /\ ans' = [ans EXCEPT ![r] = <<Place(log[r]), inc[r]>>]
  /\ UNCHANGED <<term, voted, role, log, dur, rec, inc, faults, floor, ask, asks, cmt, bad, lost>> /\ Same
Release ==
  LET A == {r \in R : ans[r] # None} IN
  /\ ask # None /\ Asked \subseteq A
  /\ \E top \in {ans[r][1] : r \in A} :
     /\ \A r \in A : AtLeast(top, ans[r][1])
     /\ floor' = [r \in R |-> IF r \in A /\ ans[r][2] = inc[r] /\ rec[r] THEN top ELSE floor[r]]
  /\ ask' = None /\ ans' = [r \in R |-> None]
  /\ UNCHANGED <<term, voted, role, log, dur, rec, inc, faults, asks, cmt, bad, lost>> /\ Same

Next == \/ AskAll \/ Release
        \/ \E i \in R : \/ Timeout(i) \/ BecomeLeader(i) \/ Client(i) \/ Change(i) \/ Commit(i) \/ Heal(i)
                        \/ Sync(i) \/ Restart(i) \/ StepUp(i) \/ PowerLoss(i) \/ Damage(i) \/ BeginAnew(i)
                        \/ Answer(i)
                        \/ \E j \in R : Grant(i, j) \/ Meet(i, j)
                        \/ \E t \in Terms : Receive(i, t)
Spec == Init /\ [][Next]_vars

(* ---- what must hold ---- *)
OneLeader == bad # "leader"
LogMatching == \A i, j \in R : \A k \in 1..Min(Len(log[i]), Len(log[j])) :
                 log[i][k].t = log[j][k].t => Pre(log[i], k) = Pre(log[j], k)
Data == bad # "data"            \* leader completeness, state machine safety; off once `lost`
Promise == bad # "promise"      \* an acknowledged entry is nowhere, though at most F were marked
(* Without changes: some replica can win if the voters in D are down. *)
Electable(D) == \E c \in R \ D : MajOf(Voters0, {v \in R \ (D \cup Marked) : UpToDate(c, v)})
CanElect == MaxChanges = 0 => \A D \in SUBSET R : Cardinality(D \cup Marked) <= F => Electable(D)
(* With all released: a replica with the latest log wins, with or without changes. *)
Latest(c) == \A r \in Recorded : UpToDate(c, r)
CanRelease == \A c \in Recorded :
  Latest(c) /\ (\A r \in Recorded : rec[r] => floor[r] # None /\ AtLeast(Place(log[c]), floor[r]))
    => MajOf(Conf(log[c]), {v \in Recorded : UpToDate(c, v) /\ ~CountsMarked(v, c)})
(* constraints *)
NotLost == ~lost
(* non-vacuity: each of these must be violated *)
NeverHealed == ~\E r \in R : inc[r] > 0 /\ ~rec[r]
NeverLost == ~lost
NeverMarkedLeader == ~\E r \in R : role[r] = "L" /\ rec[r]
NeverReleased == ~\E r \in R : role[r] = "L" /\ floor[r] # None /\ 2 * Cardinality(Marked) > Cardinality(Conf(log[r]))
NeverLearnerLeads == ~\E r \in R : role[r] = "L" /\ ~MayVote(r)
NeverChanged == ~\E k \in 1..Len(cmt) : cmt[k][1].v # {}
=============================================================================
