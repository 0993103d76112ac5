"""A whole node in a program's own loop and process. python examples/embedded_node.py [FOLDER]"""

import asyncio
import sys

import laminar


async def main(folder: str) -> None:
    async with laminar.embed(folder) as node:
        hello = await node.client.create_topic("hello", partitions=2, exist_ok=True)
        receipt = await hello.append(b"hi", key="SFO")
        print("durable: partition", receipt.partition, "offset", receipt.offset)
        async with hello.read() as records:
            async for record in records:
                print(record.offset, record.key, record.text)
        print("for other programs, while the block lasts:", node.url)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "my-node"))
