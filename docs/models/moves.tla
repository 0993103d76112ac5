------------------------------- MODULE moves -------------------------------
(* Replicas join and leave one group (docs/consensus.md#replacement): the catalog says which shall be members,
   the group's log says which are, and they learn of each other late.
   The catalog is `hist`, all records of the partition so far; its last is the newest. Planners step by a record that
   may be old (two leaders of the catalog, a command sent again), the group's leaders too. A leader's view
   only goes forward in its term, and begins anywhere.
   The group is Raft, coarse: one step is an election, the copy of a whole log, a commit. An entry is
   [t |-> term, v |-> voters, l |-> learners]. Each term begins with an entry of its own, which stands for all records
   too. A deposed leader acts until it hears of the later term. Who is down takes no step, and may come back.
   Down are ids whose node never comes: they bound the model, where all that matters is that an id was given.
   Left out: what no record decides, as recovering replicas (recovering.tla), births (groups.tla), and whether
   a majority answers before a step.
   Rules, of the catalog:
     "version" a command names the record that it was decided on, and is refused by a later one
     "fits"    a command is refused that would leave fewer replicas than the newest record wants
     "grow"    ids are given once
     "byid"    a report names the ids that are gone; without it, it means all that are leaving now
   of the group's leader:
     "newest"  it adds a replica only by a view that the catalog's leader confirmed
     "term"    ... in this term of the group
     "later"   with a member that is above all ids of its record it does nothing
     "made"    it promotes only what is made: from then on its home takes no empty log for a new one
     "all"     it removes by choice only when all that are placed vote
     "heard"   it reports when a majority knows no later term
     "own"     ... and has committed an entry of its term
     "commit"  it reports what is in no configuration that is committed or in force: the committed one too
     "one"     Raft's own: one change at a time, after an entry of its term
   of the home:
     "joining" it creates only what the newest record places, and has not made yet
     "removed" it deletes only what the catalog has as removed *)
EXTENDS Integers, Sequences, FiniteSets
CONSTANTS Init0, Wants, MaxId, MaxTerm, MaxLen, MaxHist, MaxDead, MaxBlank, Down, Rules
VARIABLES hist, log, term, files, top, leads, com, view, sure, cm, blanks
vars == <<hist, log, term, files, top, leads, com, view, sure, cm, blanks>>
known == <<view, sure>>
group == <<log, term, top, leads, com, cm>>

Ids == 1..MaxId
On(rule) == rule \in Rules
Last(s) == s[Len(s)]
Cat == Last(hist)
Maj(S, V) == 2 * Cardinality(S \cap V) > Cardinality(V)
Prefix(s, l) == Len(s) <= Len(l) /\ SubSeq(l, 1, Len(s)) = s
Members(e) == e.v \cup e.l
Least(S) == CHOOSE x \in S : \A y \in S : x <= y
Most(S) == CHOOSE x \in S : \A y \in S : y <= x
Place(l) == IF l = <<>> THEN <<0, 0>> ELSE <<Last(l).t, Len(l)>>
AtLeast(l, m) == LET p == Place(l) q == Place(m) IN p[1] > q[1] \/ (p[1] = q[1] /\ p[2] >= q[2])

Init == /\ hist = <<[placed |-> Init0, moved |-> {}, dead |-> {}, gone |-> {}, made |-> Init0,
                     want |-> Cardinality(Init0), high |-> Most(Init0)]>>
        /\ log = [r \in Ids |-> IF r \in Init0 THEN <<[t |-> 1, v |-> Init0, l |-> {}]>> ELSE <<>>]
        /\ term = [r \in Ids |-> IF r \in Init0 THEN 1 ELSE 0]
        /\ files = [r \in Ids |-> IF r \in Init0 THEN "made" ELSE "none"]
        /\ top = 1 /\ leads = {Least(Init0)} /\ com = [r \in Ids |-> IF r = Least(Init0) THEN 1 ELSE 0]
        /\ view = [r \in Ids |-> 1] /\ sure = {}
        /\ cm = <<[t |-> 1, v |-> Init0, l |-> {}]>> /\ blanks = 0

(* The catalog. A command is decided on record k, and carried out on the newest. *)
Record(new) == Len(hist) < MaxHist /\ hist' = Append(hist, new)
Decided(k) == On("version") => k = Len(hist)
Calm(rec) == rec.moved = {} /\ rec.dead = {} /\ rec.placed \subseteq rec.made
Fresh(n) == IF On("grow") THEN {Cat.high + i : i \in 1..n}
            ELSE LET free == Ids \ (Cat.placed \cup Cat.moved \cup Cat.dead) IN
                 IF n = 0 \/ free = {} THEN {} ELSE {Least(free)}
Highest(new) == IF Most(new) > Cat.high THEN Most(new) ELSE Cat.high
Want(n) == /\ n # Cat.want /\ Record([Cat EXCEPT !.want = n])
           /\ UNCHANGED <<group, files, known, blanks>>
Grow == \E k \in 1..Len(hist) :
        /\ Decided(k) /\ Calm(hist[k]) /\ Cardinality(hist[k].placed) < hist[k].want
        /\ LET new == Fresh(hist[k].want - Cardinality(hist[k].placed)) IN
           /\ new # {} /\ new \subseteq Ids
           /\ Record([Cat EXCEPT !.placed = @ \cup new, !.high = Highest(new), !.made = @ \ new])
        /\ UNCHANGED <<group, files, known, blanks>>
Shrink(r) == \E k \in 1..Len(hist) :
             /\ Decided(k) /\ Calm(hist[k]) /\ r \in hist[k].placed /\ r \in Cat.placed
             /\ Cardinality(hist[k].placed) > hist[k].want
             /\ On("fits") => Cardinality(Cat.placed) > Cat.want
             /\ Record([Cat EXCEPT !.placed = @ \ {r}, !.moved = @ \cup {r}])
             /\ UNCHANGED <<group, files, known, blanks>>
Replace(r, why) ==
  \E k \in 1..Len(hist) :
  /\ Decided(k) /\ r \in hist[k].placed /\ r \in Cat.placed
  /\ \/ why = "moved" /\ Calm(hist[k]) /\ Cardinality(hist[k].placed) = hist[k].want
     \/ /\ why = "dead" /\ Cardinality(hist[k].moved \cup hist[k].dead) < 2
        /\ r \in hist[k].made => hist[k].placed \subseteq hist[k].made
        /\ Cardinality(UNION {hist[i].dead : i \in 1..Len(hist)}) < MaxDead
  /\ LET new == Fresh(1) IN
     /\ new # {} /\ new \subseteq Ids
     /\ Record([Cat EXCEPT !.placed = (@ \ {r}) \cup new, !.high = Highest(new), !.made = @ \ new,
                           !.moved = IF why = "moved" THEN @ \cup {r} ELSE @,
                           !.dead = IF why = "dead" THEN @ \cup {r} ELSE @])
  /\ UNCHANGED <<group, files, known, blanks>>

(* The homes. What a replica that starts, or hears of a later term, knew as leader is gone. *)
Forget(S) == /\ leads' = leads \ S /\ com' = [r \in Ids |-> IF r \in S THEN 0 ELSE com[r]]
             /\ sure' = IF On("term") THEN sure \ S ELSE sure
             /\ view' = [r \in Ids |-> IF r \in S /\ r \notin sure' THEN 1 ELSE view[r]]
Blanked(r) == /\ log' = [log EXCEPT ![r] = <<>>] /\ term' = [term EXCEPT ![r] = 0] /\ Forget({r})
              /\ UNCHANGED <<hist, top, cm>>
Create(r) == \E k \in 1..Len(hist) :
             /\ On("joining") => k = Len(hist)
             /\ r \notin Down /\ files[r] = "none" /\ r \in hist[k].placed \ hist[k].made
             /\ files' = [files EXCEPT ![r] = "empty"] /\ UNCHANGED <<hist, group, known, blanks>>
Made(r) == /\ files[r] = "empty" /\ log[r] # <<>> /\ r \in Cat.placed \ Cat.made
           /\ files' = [files EXCEPT ![r] = "made"] /\ Record([Cat EXCEPT !.made = @ \cup {r}])
           /\ UNCHANGED <<group, known, blanks>>
(* The log is lost, and the home does not know that there was one. *)
Blank(r) == /\ blanks < MaxBlank /\ blanks' = blanks + 1 /\ files[r] = "empty" /\ log[r] # <<>>
            /\ Blanked(r) /\ UNCHANGED files
Delete(r) == /\ files[r] # "none"
             /\ IF On("removed") THEN r \in Cat.gone ELSE r \notin Cat.placed
             /\ files' = [files EXCEPT ![r] = "none"] /\ Blanked(r) /\ UNCHANGED blanks

(* The group. A term without a leader changes nothing, so each has one. *)
Elect(i) ==
  /\ top < MaxTerm /\ top' = top + 1
  /\ files[i] # "none" /\ log[i] # <<>> /\ i \in Last(log[i]).v /\ Len(log[i]) < MaxLen
  /\ \E Q \in SUBSET Last(log[i]).v :
     /\ i \in Q /\ Maj(Q, Last(log[i]).v)
     /\ \A q \in Q : files[q] # "none" /\ AtLeast(log[i], log[q])
     /\ term' = [q \in Ids |-> IF q \in Q THEN top' ELSE term[q]]
     /\ leads' = (leads \ Q) \cup {i} /\ com' = [r \in Ids |-> IF r \in Q THEN 0 ELSE com[r]]
     /\ sure' = IF On("term") THEN sure \ Q ELSE sure
     /\ view' = [r \in Ids |-> IF r \in Q /\ r \notin sure' THEN 1 ELSE view[r]]
  /\ log' = [log EXCEPT ![i] = Append(@, [t |-> top', v |-> Last(@).v, l |-> Last(@).l])]
  /\ UNCHANGED <<hist, files, cm, blanks>>
Copy(i, j) ==
  /\ i \in leads /\ j # i /\ j \in Members(Last(log[i])) /\ files[j] # "none" /\ term[j] <= term[i]
  /\ log[j] # log[i] \/ term[j] < term[i]
  /\ log' = [log EXCEPT ![j] = log[i]] /\ term' = [term EXCEPT ![j] = term[i]]
  /\ Forget({j}) /\ UNCHANGED <<hist, files, top, cm, blanks>>
Commit(i) == LET l == log[i] IN
  /\ i \in leads /\ com[i] < Len(l) /\ Last(l).t = term[i]
  /\ Maj({j \in Ids : files[j] # "none" /\ term[j] = term[i] /\ log[j] = l}, Last(l).v)
  /\ com' = [com EXCEPT ![i] = Len(l)]
  /\ cm' = IF Prefix(l, cm) THEN cm ELSE l
  /\ UNCHANGED <<hist, log, term, files, top, leads, known, blanks>>

(* Its leader, beside the catalog. *)
See(i) == \E k \in (view[i] + 1)..Len(hist) :
          /\ i \in leads /\ view' = [view EXCEPT ![i] = k]
          /\ UNCHANGED <<hist, group, files, sure, blanks>>
Confirm(i) == /\ i \in leads /\ (i \notin sure \/ view[i] < Len(hist))
              /\ sure' = sure \cup {i} /\ view' = [view EXCEPT ![i] = Len(hist)]
              /\ UNCHANGED <<hist, group, files, blanks>>
Without(e, r) == [e EXCEPT !.v = @ \ {r}, !.l = @ \ {r}]
(* As `next_step`: the first kind of step of which there is one. *)
Steps(i) ==
  LET rec == hist[view[i]]
      e == Last(log[i])
      alien == {r \in Members(e) : r \notin rec.placed \cup rec.moved \cup rec.dead}
      dead == rec.dead \cap Members(e)
      new == IF i \in sure \/ ~On("newest") THEN rec.placed \ Members(e) ELSE {}
      awaited == rec.placed \ e.v
      ready == {r \in awaited \cap e.l : On("made") => r \in rec.made}   \* caught up or not
      left == IF On("all") /\ awaited # {} THEN {} ELSE rec.moved \cap Members(e) IN
  IF On("later") /\ \E r \in Members(e) : r > rec.high THEN {}
  ELSE IF alien # {} THEN {Without(e, r) : r \in alien}
  ELSE IF dead # {} THEN {Without(e, r) : r \in dead}
  ELSE IF new # {} THEN {[e EXCEPT !.l = @ \cup {Least(new)}]}
  ELSE IF ready # {} /\ (Cardinality(e.v) > 1 \/ ready = awaited)
       THEN {[e EXCEPT !.l = @ \ {Least(ready)}, !.v = @ \cup {Least(ready)}]}
  ELSE {Without(e, r) : r \in left}
Step(i) == /\ i \in leads /\ Len(log[i]) < MaxLen /\ Last(log[i]).t = term[i]
           /\ On("one") => com[i] = Len(log[i])
           /\ \E e \in Steps(i) : e.v # {} /\ log' = [log EXCEPT ![i] = Append(@, [e EXCEPT !.t = term[i]])]
           /\ UNCHANGED <<hist, term, files, top, leads, com, known, cm, blanks>>
Report(i) ==
  LET l == log[i]
      seen == Members(Last(l)) \cup IF On("commit") THEN Members(l[IF com[i] > 0 THEN com[i] ELSE 1]) ELSE {}
      rec == hist[view[i]]
      gone == (rec.moved \cup rec.dead) \ seen
      named == (IF On("byid") \/ gone = {} THEN gone ELSE Ids) \cap (Cat.moved \cup Cat.dead) IN
  /\ i \in leads /\ named # {}
  /\ On("heard") => Maj({j \in Ids : files[j] # "none" /\ term[j] <= term[i]}, Last(l).v)
  /\ On("own") => com[i] > 0
  /\ Record([Cat EXCEPT !.moved = @ \ named, !.dead = @ \ named, !.gone = @ \cup named])
  /\ UNCHANGED <<group, files, known, blanks>>

Next == \/ \E n \in Wants : Want(n)
        \/ Grow
        \/ \E r \in Ids : \/ Shrink(r) \/ Replace(r, "moved") \/ Replace(r, "dead")
                          \/ Create(r) \/ Made(r) \/ Blank(r) \/ Delete(r)
                          \/ Elect(r) \/ Commit(r) \/ See(r) \/ Confirm(r) \/ Step(r) \/ Report(r)
                          \/ \E j \in Ids : Copy(r, j)
Spec == Init /\ [][Next]_vars

(* Whose grants a replica could get now, of the voters that it knows, in a term above all. *)
Grants(i) == {q \in Last(log[i]).v : files[q] # "none" /\ AtLeast(log[i], log[q])}
Usable == {i \in Ids : /\ files[i] # "none" /\ log[i] # <<>> /\ i \in Last(log[i]).v
                       /\ Maj(Grants(i), Last(log[i]).v)}
Half(V) == Cardinality(V) \div 2 + 1
Rest(n, S) == IF n > Cardinality(S) THEN n - Cardinality(S) ELSE 0
Apart(i, j) ==                 \* majorities of both that share no replica
  Rest(Half(Last(log[i]).v), Grants(i) \ Grants(j)) + Rest(Half(Last(log[j]).v), Grants(j) \ Grants(i))
    <= Cardinality(Grants(i) \cap Grants(j))
Common == \A i, j \in Usable : ~Apart(i, j)
Complete == \A i \in Usable : Prefix(cm, log[i])
(* What is committed is held by a majority of the voters that it is committed with. *)
Held == Maj({r \in Ids : files[r] # "none" /\ Prefix(cm, log[r])}, Last(cm).v)
NeverBack == \A k \in 1..Len(cm) - 1 : \A r \in Members(cm[k]) \ Members(cm[k + 1]) :
               \A n \in k + 1..Len(cm) : r \notin cm[n].v
(* The planner never goes below what is wanted; nor does the group, but for the dead. *)
Enough == \A k \in 1..Len(hist) - 1 :
            Cardinality(hist[k + 1].placed) < Cardinality(hist[k].placed) =>
              Cardinality(hist[k + 1].placed) >= hist[k + 1].want
Died == UNION {hist[k].dead : k \in 1..Len(hist)}
Wide == \A k \in 1..Len(cm) : Cardinality(cm[k].v) + Cardinality(Died)
          >= Least({hist[n].want : n \in 1..Len(hist)} \cup {Cardinality(Init0)})
=============================================================================
