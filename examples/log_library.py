"""A durable log in a program of one's own: no server, no cluster. python examples/log_library.py [FOLDER]"""

import asyncio
import sys

import laminar


async def main(folder: str) -> None:
    async with laminar.log.open_log(folder) as log:
        receipt = await log.append([b"SFO", b"JFK"], keys=[b"west", b"east"], tags=["in", "out"])
        print("durable:", receipt.offset, "to", receipt.next_offset - 1)
        async for record in log.read(start=receipt.offset):
            print(record.offset, record.key, record.tag, record.value)
        print("any offset, in any order:", (await log.record(receipt.offset + 1)).value)
        await log.trim_before(receipt.offset)
        print("the log has offsets", log.start_offset, "up to", log.end_offset)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "my-log"))
