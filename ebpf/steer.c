/* Laminar's XDP program: a packet goes on at the CPU of the shard (or controller) that it is meant for.
 *
 * It drops nothing and changes no byte. What it doesn't understand, and what is not for a node that asked for
 * steering, passes to the kernel as if the program were not there. Which shard's socket gets a connection or
 * a datagram is decided later, by the programs on the sockets, with the same arithmetic (ownership.h).
 *
 * ebpf/toolchain.py compiles it with BCC and defines LAMINAR_CPUS, the number of possible CPUs; ebpf/loader.py
 * loads it.
 * ebpf/layout.py has the same structs and numbers.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_ether.h>
#include <uapi/linux/in.h>
#include <uapi/linux/ip.h>
#include <uapi/linux/ipv6.h>
#include <uapi/linux/tcp.h>
#include <uapi/linux/udp.h>

#include "ownership.h"

/* Nodes of this host that share the program; each has a slot. */
#define SLOTS 16
/* Rows of a slot: its shards, and last its controller. */
#define ROWS (LAMINAR_MAX_SHARDS + 1)
#define NO_CPU 0xffff

/* What a packet is, by the port it goes to. */
#define RULE_SHARED_TCP 0
#define RULE_OWN_TCP 1
#define RULE_APPEND_UDP 2
#define RULE_GOSSIP_UDP 3
#define RULES 4

/* Why a packet passed untouched. */
#define PASSED_NOT_IP 0
#define PASSED_MALFORMED 1
#define PASSED_FRAGMENT 2
#define PASSED_OTHER_PROTOCOL 3
#define PASSED_NOT_OURS 4
#define PASSED_NO_HASH 5
#define PASSED_NO_CPU 6
#define REASONS 7

#define VLAN_TAGS 2
#define EXTENSION_HEADERS 6
/* No header that we look for begins further from the packet's start. */
#define FURTHEST 1500

struct vlan {
	__be16 tag;
	__be16 protocol;
};

/* First bytes of a UDP append: "LMU1", the partition's hash. */
struct append {
	__be32 magic;
	__be32 partition_hash;
};
#define APPEND_MAGIC 0x4c4d5531

/* A destination, every field as it stands in the packet. IPv4 is ::ffff:a.b.c.d; zero stands for any address. */
struct place {
	__be32 address[4];
	__be16 port;
	u8 protocol;
	u8 zero;
};

/* Everything about a destination is in one value, so that it is replaced as a whole. */
struct target {
	u32 rule;
	u32 slot;
	/* With RULE_OWN_TCP and RULE_GOSSIP_UDP the row of the process; other rules compute the row. */
	u32 row;
	/* The number of the node's shards. */
	u32 shards;
	/* By row; NO_CPU where a process is not pinned. */
	u16 cpus[ROWS];
};

BPF_HASH(targets, struct place, struct target, 4096);
BPF_CPUMAP(cpus, LAMINAR_CPUS);
/* Two counters, redirected and already there, for each rule of each row of each slot. */
BPF_PERCPU_ARRAY(steered, u64, SLOTS * ROWS * RULES * 2);
BPF_PERCPU_ARRAY(passed, u64, REASONS);

static inline int pass(u32 reason)
{
	u64 *count = passed.lookup(&reason);

	if (count)
		(*count)++;
	return XDP_PASS;
}

static inline struct target *target_of(struct place *place, int is_ipv6)
{
	struct target *target = targets.lookup(place);

	if (target)
		return target;
	/* A node that listens on every address. */
	place->address[0] = 0;
	place->address[1] = 0;
	place->address[2] = is_ipv6 ? 0 : bpf_htonl(0xffff);
	place->address[3] = 0;
	return targets.lookup(place);
}

static inline int steer_to(struct target *target, u64 row)
{
	u32 cpu, at;
	u64 *count;

	/* Keeps the row in one register, so that the verifier knows its bound after the comparison. */
	asm volatile("" : "+r"(row));
	if (row >= ROWS)
		return pass(PASSED_NO_CPU);
	cpu = target->cpus[row];
	if (cpu == NO_CPU)
		return pass(PASSED_NO_CPU);
	at = ((target->slot * ROWS + row) * RULES + target->rule) * 2;
	if (cpu == bpf_get_smp_processor_id()) {
		at++;
		count = steered.lookup(&at);
		if (count)
			(*count)++;
		return XDP_PASS;
	}
	count = steered.lookup(&at);
	if (count)
		(*count)++;
	/* If the map has no such CPU, the packet passes. */
	return cpus.redirect_map(cpu, XDP_PASS);
}

int steer(struct xdp_md *context)
{
	void *data = (void *)(long)context->data;
	void *end = (void *)(long)context->data_end;
	struct ethhdr *ethernet = data;
	struct place place = {};
	struct target *target;
	u32 offset = sizeof(*ethernet), transport_bytes, row, source_port;
	u16 protocol;
	u8 next;
	int is_ipv6, i;

	if (data + sizeof(*ethernet) > end)
		return pass(PASSED_MALFORMED);
	protocol = ethernet->h_proto;
#pragma unroll
	for (i = 0; i < VLAN_TAGS; i++) {
		if (protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD)) {
			struct vlan *vlan = data + offset;

			if ((void *)(vlan + 1) > end)
				return pass(PASSED_MALFORMED);
			protocol = vlan->protocol;
			offset += sizeof(*vlan);
		}
	}

	if (protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + offset;
		u32 header_bytes, total_bytes;

		if ((void *)(ip + 1) > end || ip->version != 4)
			return pass(PASSED_MALFORMED);
		header_bytes = ip->ihl * 4;
		total_bytes = bpf_ntohs(ip->tot_len);
		if (header_bytes < sizeof(*ip) || total_bytes < header_bytes)
			return pass(PASSED_MALFORMED);
		if (data + offset + total_bytes > end)
			return pass(PASSED_MALFORMED);
		/* A fragment, of which more follow or which is not the first: it may have no ports. */
		if (ip->frag_off & bpf_htons(0x3fff))
			return pass(PASSED_FRAGMENT);
		next = ip->protocol;
		place.address[2] = bpf_htonl(0xffff);
		place.address[3] = ip->daddr;
		offset += header_bytes;
		transport_bytes = total_bytes - header_bytes;
		is_ipv6 = 0;
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + offset;

		if ((void *)(ip + 1) > end || ip->version != 6)
			return pass(PASSED_MALFORMED);
		transport_bytes = bpf_ntohs(ip->payload_len);
		offset += sizeof(*ip);
		if (data + offset + transport_bytes > end)
			return pass(PASSED_MALFORMED);
		next = ip->nexthdr;
		place.address[0] = ip->daddr.in6_u.u6_addr32[0];
		place.address[1] = ip->daddr.in6_u.u6_addr32[1];
		place.address[2] = ip->daddr.in6_u.u6_addr32[2];
		place.address[3] = ip->daddr.in6_u.u6_addr32[3];
		is_ipv6 = 1;
		for (i = 0; i < EXTENSION_HEADERS; i++) {
			struct ipv6_opt_hdr *header;
			u32 header_bytes;

			if (next == IPPROTO_FRAGMENT)
				return pass(PASSED_FRAGMENT);
			if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS &&
			    next != IPPROTO_AH)
				break;
			if (offset > FURTHEST)
				return pass(PASSED_MALFORMED);
			header = data + offset;
			if ((void *)(header + 1) > end)
				return pass(PASSED_MALFORMED);
			header_bytes = next == IPPROTO_AH ? (header->hdrlen + 2) * 4 : (header->hdrlen + 1) * 8;
			if (header_bytes > transport_bytes)
				return pass(PASSED_MALFORMED);
			next = header->nexthdr;
			offset += header_bytes;
			transport_bytes -= header_bytes;
		}
	} else {
		return pass(PASSED_NOT_IP);
	}
	if (offset > FURTHEST)
		return pass(PASSED_MALFORMED);

	place.protocol = next;
	if (next == IPPROTO_TCP) {
		struct tcphdr *tcp = data + offset;

		if ((void *)(tcp + 1) > end || transport_bytes < sizeof(*tcp))
			return pass(PASSED_MALFORMED);
		source_port = bpf_ntohs(tcp->source);
		place.port = tcp->dest;
	} else if (next == IPPROTO_UDP) {
		struct udphdr *udp = data + offset;

		if ((void *)(udp + 1) > end || transport_bytes < sizeof(*udp))
			return pass(PASSED_MALFORMED);
		source_port = 0;
		place.port = udp->dest;
		/* A datagram may not be longer than its packet. Bytes of the packet after it do not belong to it. */
		if (bpf_ntohs(udp->len) < sizeof(*udp) || bpf_ntohs(udp->len) > transport_bytes)
			return pass(PASSED_MALFORMED);
		transport_bytes = bpf_ntohs(udp->len);
	} else {
		return pass(PASSED_OTHER_PROTOCOL);
	}

	target = target_of(&place, is_ipv6);
	if (!target)
		return pass(PASSED_NOT_OURS);
	row = target->row;
	if (target->rule == RULE_SHARED_TCP) {
		if (!target->shards)
			return pass(PASSED_NO_CPU);
		row = laminar_shard_of_source_port(source_port, target->shards);
	} else if (target->rule == RULE_APPEND_UDP) {
		struct append *append = data + offset + sizeof(struct udphdr);

		if (transport_bytes < sizeof(struct udphdr) + sizeof(*append) || (void *)(append + 1) > end)
			return pass(PASSED_NO_HASH);
		if (append->magic != bpf_htonl(APPEND_MAGIC))
			return pass(PASSED_NO_HASH);
		row = laminar_owner_shard(bpf_ntohl(append->partition_hash), target->shards);
	}
	return steer_to(target, row);
}
