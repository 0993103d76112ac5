/* Which shard owns a partition, and which shard a TCP connection is for: what router/ownership.py says, in C.
 *
 * Fixed-width integers only, so that the program in the kernel and a library for tests come to the same answer
 * as Python. Needs u32 and u64 to be defined; knows nothing of packets.
 */

/* More shards than this are not steered. The loop over them has to end where the verifier can see it. */
#define LAMINAR_MAX_SHARDS 127u

static inline u32 laminar_rotate_left(u32 value, u32 bits)
{
	return (value << bits) | (value >> (32 - bits));
}

/* mmh3 (x86, 32 bits, seed 0) of 8 bytes: the two arguments as little-endian u32. */
static inline u32 laminar_draw(u32 partition_hash, u32 shard)
{
	u32 hash = 0, block;

	block = partition_hash * 0xcc9e2d51u;
	hash ^= laminar_rotate_left(block, 15) * 0x1b873593u;
	hash = laminar_rotate_left(hash, 13) * 5 + 0xe6546b64u;

	block = shard * 0xcc9e2d51u;
	hash ^= laminar_rotate_left(block, 15) * 0x1b873593u;
	hash = laminar_rotate_left(hash, 13) * 5 + 0xe6546b64u;

	hash ^= 8; /* the length in bytes */
	hash ^= hash >> 16;
	hash *= 0x85ebca6bu;
	hash ^= hash >> 13;
	hash *= 0xc2b2ae35u;
	hash ^= hash >> 16;
	return hash;
}

/* router.owner_shard: the highest draw wins, the lower shard keeps a tie. `shards` is at least 1.
 *
 * The winner is kept without a branch. With a branch, the verifier would follow every round once for each shard
 * that can have won before, and give up. It would do the same for a mask of which it knows that there are two
 * values. The empty assembly keeps the compiler from turning the arithmetic into a branch.
 */
static inline u32 laminar_owner_shard(u32 partition_hash, u32 shards)
{
	u64 highest = 0, owner = 0, draw, higher;
	u32 shard;

#pragma clang loop unroll(disable)
	for (shard = 0; shard < LAMINAR_MAX_SHARDS; shard++) {
		if (shard >= shards)
			break;
		draw = laminar_draw(partition_hash, shard);
		higher = (highest - draw) >> 63; /* 1 if draw > highest, else 0 */
		asm volatile("" : "+r"(higher));
		highest += (draw - highest) * higher;
		owner += (shard - owner) * higher;
	}
	return (u32)owner;
}

/* router.shard_of_source_port, for a port in the host's byte order. `shards` is at least 1. */
static inline u32 laminar_shard_of_source_port(u32 port, u32 shards)
{
	return (port >> 1) % shards;
}
