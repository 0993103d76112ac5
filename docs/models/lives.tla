-------------------------------- MODULE lives --------------------------------
(* The part that transactions.tla leaves out: partitions forget what they published, and a name has several lives,
   as its sink is deleted and begun again. One name, batches 1..MaxN in each life.
   As there, one step = one committed entry; every request, answer, driver and coordinator of every epoch and
   life stays in the air for ever, so it may come, or come again, at any time.
   A stage is <<batch, epoch, life, prepare>>. By the first two a partition knows it. The life, of the driver who
   staged it, is a ghost. The prepare tells those of one batch and epoch apart: it is the place of the prepare's entry
   in the log, here how often the partition forgot before. A decision names the prepares that it rests on. *)
EXTENDS Integers, Sequences, FiniteSets
CONSTANTS P, MaxN, MaxEpoch, MaxLife, MaxForgets, Mut
VARIABLES epoch, life, drivers,   \* coordinator: epoch in its log; life; every <<life, epoch>> that began
          dec, done,              \* decisions of this life; highest batch that is finished
          deleting,               \* nothing is decided, partitions forget
          gone,                   \* partitions that did
          air,                    \* every decision that ever was: a coordinator may still carry it out
          staged, prepared, pub,    \* per partition
          mem, forgets,           \* per partition: last batch known as published; how often it forgot
          pok, pack               \* answers in the air: prepared, published
vars == <<epoch, life, drivers, dec, done, deleting, gone, air, staged, prepared, pub, mem, forgets, pok, pack>>
coordinator == <<epoch, life, drivers, dec, done, deleting, gone, air>>
partitions == <<staged, prepared, pub, mem, forgets>>
Batches == 1..MaxN
Stages == Batches \X (1..MaxEpoch) \X (1..MaxLife) \X (0..MaxForgets)
Same(s, n, e) == s[1] = n /\ s[2] = e

Init == /\ epoch = 1 /\ life = 1 /\ drivers = {<<1, 1>>} /\ dec = <<>> /\ done = 0 /\ deleting = FALSE
        /\ gone = {} /\ air = {} /\ pok = {} /\ pack = {}
        /\ staged = [p \in P |-> {}] /\ prepared = [p \in P |-> {}] /\ pub = [p \in P |-> <<>>]
        /\ mem = [p \in P |-> 0] /\ forgets = [p \in P |-> 0]

Begin == /\ epoch < MaxEpoch /\ ~deleting
         /\ epoch' = epoch + 1 /\ drivers' = drivers \cup {<<life, epoch + 1>>}
         /\ UNCHANGED <<life, dec, done, deleting, gone, air, pok, pack, partitions>>

(* In three steps: an epoch that refuses all drivers; each partition forgets; the name is free, and begins. *)
Delete == /\ epoch < MaxEpoch /\ ~deleting /\ life < MaxLife
          /\ done = Len(dec) \/ "undone" \in Mut
          /\ epoch' = epoch + 1 /\ deleting' = TRUE /\ gone' = {}
          /\ UNCHANGED <<life, drivers, dec, done, air, pok, pack, partitions>>
ForgetAll(p) == /\ deleting /\ p \notin gone /\ gone' = gone \cup {p} /\ forgets[p] < MaxForgets
                /\ staged' = [staged EXCEPT ![p] = {s \in @ : s[2] > epoch}]
                /\ prepared' = [prepared EXCEPT ![p] = {s \in @ : s[2] > epoch}]
                /\ mem' = [mem EXCEPT ![p] = 0] /\ forgets' = [forgets EXCEPT ![p] = @ + 1]
                /\ UNCHANGED <<epoch, life, drivers, dec, done, deleting, air, pub, pok, pack>>
Anew == /\ deleting /\ epoch < MaxEpoch
        /\ gone = P \/ "early" \in Mut
        /\ epoch' = IF "again" \in Mut THEN 1 ELSE epoch + 1
        /\ life' = life + 1 /\ drivers' = drivers \cup {<<life + 1, epoch'>>}
        /\ dec' = <<>> /\ done' = 0 /\ deleting' = FALSE
        /\ UNCHANGED <<gone, air, pok, pack, partitions>>

Stage(n, e, l, p) == /\ <<l, e>> \in drivers /\ n <= Len(dec) + 1 /\ mem[p] < n
                     /\ ~\E s \in staged[p] : Same(s, n, e)
                     /\ staged' = [staged EXCEPT ![p] = @ \cup {<<n, e, l, forgets[p]>>}]
                     /\ UNCHANGED <<coordinator, prepared, pub, mem, forgets, pok, pack>>
Prepare(s, p) == /\ s \in staged[p] /\ mem[p] < s[1]
                 /\ prepared' = [prepared EXCEPT ![p] = @ \cup {s}] /\ pok' = pok \cup {<<p, s>>}
                 /\ UNCHANGED <<coordinator, staged, pub, mem, forgets, pack>>
Decide(n, e, f) == /\ ~deleting /\ n = Len(dec) + 1 /\ done = Len(dec) /\ e = epoch
                   /\ \A p \in P : Same(f[p], n, e) /\ <<p, f[p]>> \in pok
                   /\ dec' = Append(dec, f) /\ air' = air \cup {<<life, n, e, f>>}
                   /\ UNCHANGED <<epoch, life, drivers, done, deleting, gone, pok, pack, partitions>>
Publish(d, p) ==
  /\ IF mem[p] >= d[2]
     THEN UNCHANGED <<staged, prepared, pub, mem>>
     ELSE \E s \in prepared[p] :
          /\ Same(s, d[2], d[3]) /\ (s[4] = d[4][p][4] \/ "anyprepare" \in Mut)
          /\ pub' = [pub EXCEPT ![p] = Append(@, <<d[1], d[2], s[3]>>)]
          /\ staged' = [staged EXCEPT ![p] = @ \ {s}] /\ prepared' = [prepared EXCEPT ![p] = @ \ {s}]
          /\ mem' = [mem EXCEPT ![p] = d[2]]
  /\ pack' = pack \cup {<<p, d>>}
  /\ UNCHANGED <<coordinator, forgets, pok>>
Finish == /\ done < Len(dec)
          /\ \E d \in air : /\ d[1] = life /\ d[2] = done + 1 /\ \A p \in P : <<p, d>> \in pack
          /\ done' = done + 1
          /\ UNCHANGED <<epoch, life, drivers, dec, deleting, gone, air, pok, pack, partitions>>
(* The coordinator has committed that nothing is undone. *)
Forget(p) == /\ mem[p] > 0 /\ forgets[p] < MaxForgets /\ (done = Len(dec) \/ "hasty" \in Mut)
             /\ mem' = [mem EXCEPT ![p] = 0] /\ forgets' = [forgets EXCEPT ![p] = @ + 1]
             /\ UNCHANGED <<coordinator, staged, prepared, pub, pok, pack>>

Next == \/ Begin \/ Delete \/ Anew \/ Finish
        \/ \E p \in P : \/ ForgetAll(p) \/ Forget(p)
                        \/ \E n \in Batches, d \in drivers : Stage(n, d[2], d[1], p)
                        \/ \E s \in staged[p] : Prepare(s, p)
                        \/ \E d \in air : Publish(d, p)
        \/ \E f \in [P -> {a[2] : a \in pok}] : Decide(Len(dec) + 1, epoch, f) /\ Len(dec) < MaxN
Spec == Init /\ [][Next]_vars

Later(a, b) == a[1] < b[1] \/ (a[1] = b[1] /\ a[2] < b[2])
Once == \A p \in P : \A i, j \in 1..Len(pub[p]) : i < j => Later(pub[p][i], pub[p][j])  \* and in order
Own == \A d \in air : \A p \in P : d[4][p][3] = d[1]     \* what a life commits, one of its drivers staged
Kept == \A d \in air : (d[1] = life /\ d[2] > done) => \A p \in P :   \* what is decided can be finished
          mem[p] >= d[2] \/ d[4][p] \in prepared[p]
Whole == \A n \in 1..done : \A p \in P :                 \* what is said to be done is there
           \E i \in 1..Len(pub[p]) : pub[p][i][1] = life /\ pub[p][i][2] = n
Fresh == deleting \/ \A p \in P : mem[p] <= Len(dec)    \* no driver gets the answer that a batch is there which is not
NeverThird == \A p \in P : Len(pub[p]) < 3
=============================================================================
